"""Checks of a decoded request's values; every error names the field, the value and the allowed values.

Values are never clamped or dropped: a value that cannot be honoured is an error.
"""

from collections.abc import Sized
from typing import Any

from penstock.core.errors import RequestError
from penstock.frontend.openai.agents import PRIORITY_MAX, agent_options
from penstock.frontend.openai.bodies import (
    STOP_CHARACTERS_MAX,
    STOPS_MAX,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
)
from penstock.frontend.openai.lenient import name_once
from penstock.frontend.openai.media import check_part
from penstock.frontend.openai.tools import check_tools, wrong
from penstock.frontend.text.template import RESERVED

ROLES = ("system", "developer", "user", "assistant", "tool")
LOGPROBS_MAX = 20
STOP_IDS_MAX = 64
BIASES_MAX = 1024
BIAS_MAX = 100
ALLOWED_MAX = 65_536
BAD_WORDS_MAX = 128
BAD_WORD_CHARACTERS_MAX = 128
CACHE_SALT_CHARACTERS_MAX = 256
_SEED_BITS = 63
_ID_DIGITS_MAX = 10
_TOP_K_MAX = (1 << 31) - 1

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "suffix": ("",),
}
"""Unsupported fields, each with the values that have no effect."""
_HINTS = ("prediction", "verbosity")
"""Fields of a chat that ask models of OpenAI's for the same answer, sooner or shorter; other models have no such setting."""
_VERBOSITIES = ("low", "medium", "high")
_RANGES: dict[str, tuple[float, float | None]] = {
    "max_tokens": (0, None),  # of completions
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 10),
    "min_p": (0, 1),
    "top_k": (-1, _TOP_K_MAX),  # -1 and 0 turn it off, as in vLLM
    "min_tokens": (0, None),
    "prompt_logprobs": (0, LOGPROBS_MAX),
    "priority": (-PRIORITY_MAX, PRIORITY_MAX),
    "seed": (-(1 << _SEED_BITS), (1 << _SEED_BITS) - 1),
}
"""Bounds of each field's values; None: no upper one."""
_ABOVE_LOW = frozenset({"repetition_penalty"})
"""Fields that must be above their lower bound."""


def check_chat(request: ChatRequest, choices_max: int) -> None:
    """Raises: RequestError: a value is out of its range, or asks for what is not served."""
    _check_range(request, "max_tokens", 1, None)
    _check_generation(request, choices_max)
    _check_range(request, "max_completion_tokens", 1, None)
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        raise RequestError(
            f"max_tokens: {request.max_tokens} contradicts max_completion_tokens: "
            f"{request.max_completion_tokens}; send one of them",
            param="max_tokens",
        )
    _check_range(request, "thinking_token_budget", 0, None)
    _check_range(request, "top_logprobs", 0, LOGPROBS_MAX)
    if request.top_logprobs and not request.logprobs:
        raise RequestError(
            f"top_logprobs: got {request.top_logprobs} without logprobs; set logprobs to true",
            param="top_logprobs",
        )
    for name in request.chat_template_kwargs or ():
        if name in RESERVED:
            raise RequestError(
                f"chat_template_kwargs.{name}: is not the request's to set; leave it out",
                param=f"chat_template_kwargs.{name}",
            )
    if request.verbosity is not None and request.verbosity not in _VERBOSITIES:
        raise RequestError(
            f"verbosity: must be one of {', '.join(_VERBOSITIES)}, got {str(request.verbosity)[:40]!r}",
            param="verbosity",
        )
    for name in _HINTS:
        if getattr(request, name) is not None:
            name_once(name)
    _check_final_message(request)
    check_tools(request)
    if not request.messages:
        raise RequestError("messages: must hold at least one message, got none", param="messages")
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")


def _check_final_message(request: ChatRequest) -> None:
    if not request.continue_final_message:
        return
    if request.add_generation_prompt:
        raise RequestError(
            "continue_final_message: contradicts add_generation_prompt: true; send one of them",
            param="continue_final_message",
        )
    if not request.messages or request.messages[-1].role != "assistant" or not request.messages[-1].content:
        raise RequestError(
            "continue_final_message: expected a last message of role 'assistant' with content; add it, or leave this out",
            param="continue_final_message",
        )


def check_completion(request: CompletionRequest, choices_max: int) -> None:
    """Raises: RequestError: a value is out of its range, or asks for what is not served."""
    _check_generation(request, choices_max)
    _check_range(request, "logprobs", 0, LOGPROBS_MAX)
    _check_range(request, "best_of", request.n or 1, choices_max)
    if request.stream and request.answers_per_prompt > (request.n or 1):
        raise RequestError(
            f"best_of: got {request.best_of} with n = {request.n or 1} and stream: true; the best answers are known at the end;"
            " leave out stream or best_of",
            param="best_of",
        )
    prompt = request.prompt
    _check_continuation(request, choices_max)
    if isinstance(prompt, str):
        return
    if not prompt:
        raise RequestError("prompt: must not be an empty list", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        names = " and ".join(
            sorted({str: "strings", int: "token ids", list: "lists"}[kind] for kind in kinds)
        )
        raise RequestError(
            f"prompt: mixes {names}; expected a string, strings, token ids or lists of token ids",
            param="prompt",
        )
    each = request.answers_per_prompt
    choices = each * (1 if kinds == {int} else len(prompt))
    if choices > choices_max:
        raise RequestError(
            f"prompt: {len(prompt)} prompts times {'best_of' if each > (request.n or 1) else 'n'} = {each} are {choices} choices, "
            f"at most {choices_max} are allowed; send several requests",
            param="prompt",
        )


def _check_continuation(request: CompletionRequest, choices_max: int) -> None:
    said, prompt = request.continuation, request.prompt
    if said is None:
        return
    if (
        isinstance(prompt, str)
        or not prompt
        or not isinstance(prompt[0], int)
        or request.answers_per_prompt > 1
    ):
        raise RequestError("continuation: needs a prompt of token ids, and one choice", param="continuation")
    for name in ("echo", "prompt_logprobs", "stop"):
        if getattr(request, name):
            raise RequestError(
                f"{name}: not together with continuation, which has no text before it; leave one of them out",
                param=name,
            )
    if not 0 <= said.num_emitted < len(prompt):
        raise RequestError(
            f"continuation.num_emitted: must be >= 0 and < {len(prompt)}, the prompt's tokens, got {said.num_emitted}",
            param="continuation.num_emitted",
        )
    if not 0 <= said.choice < choices_max:
        raise RequestError(
            f"continuation.choice: must be >= 0 and < {choices_max}, got {said.choice}",
            param="continuation.choice",
        )


def _check_generation(request: GenerationRequest, choices_max: int) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value is None or value in neutral or _is_ruled_out(request, name):
            continue
        raise RequestError(f"{name}: not supported by this server; leave it out", param=name)
    _check_range(request, "n", 1, choices_max)
    for name, (low, high) in _RANGES.items():
        if getattr(request, name) is not None:
            _check_range(request, name, low, high, above_low=name in _ABOVE_LOW)
    if request.stop is not None:
        _check_stops(request)
    if request.stop_token_ids:
        _check_length("stop_token_ids", request.stop_token_ids, STOP_IDS_MAX, "ids")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError(
            f"prompt_logprobs: got {request.prompt_logprobs} with stream: true; a stream has none; leave out stream, or ask for them"
            " by echo and logprobs of /v1/completions",
            param="prompt_logprobs",
        )
    _check_limits(request)
    if request.cache_salt is not None:
        if not request.cache_salt:
            raise RequestError("cache_salt: must not be empty; leave it out", param="cache_salt")
        _check_length("cache_salt", request.cache_salt, CACHE_SALT_CHARACTERS_MAX, "characters")
    agent_options(request)


def _check_limits(request: GenerationRequest) -> None:
    if not (request.logit_bias or request.bad_words) and request.allowed_token_ids is None:
        return
    _check_length("logit_bias", request.logit_bias or (), BIASES_MAX, "token ids")
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < _ID_DIGITS_MAX):
            raise RequestError(
                f"logit_bias: expected token ids as keys, got {key[:40]!r}", param="logit_bias"
            )
        if not -BIAS_MAX <= bias <= BIAS_MAX:
            raise RequestError(
                f"logit_bias: must be >= {-BIAS_MAX} and <= {BIAS_MAX}, got {bias} for token {key}",
                param="logit_bias",
            )
    if request.allowed_token_ids == []:
        raise RequestError("allowed_token_ids: must not be empty; leave it out", param="allowed_token_ids")
    _check_length("allowed_token_ids", request.allowed_token_ids or (), ALLOWED_MAX, "ids")
    _check_length("bad_words", request.bad_words or (), BAD_WORDS_MAX, "words")
    for index, word in enumerate(request.bad_words or ()):
        if not word.strip() or len(word) > BAD_WORD_CHARACTERS_MAX:
            raise RequestError(
                f"bad_words: word {index} has {len(word)} characters, expected 1 to {BAD_WORD_CHARACTERS_MAX}, not only spaces",
                param="bad_words",
            )


def _is_ruled_out(request: GenerationRequest, name: str) -> bool:
    """Tell whether the request disables the field itself: with `function_call` "none", `functions` has no effect."""
    return name == "functions" and getattr(request, "function_call", None) == "none"


def _check_range(
    request: GenerationRequest, name: str, low: float, high: float | None, *, above_low: bool = False
) -> None:
    value = getattr(request, name)
    if value is None:
        return
    if (value > low or (value == low and not above_low)) and (high is None or value <= high):
        return
    bounds = f"{'>' if above_low else '>='} {low}" + ("" if high is None else f" and <= {high}")
    raise RequestError(f"{name}: must be {bounds}, got {value}", param=name)


def _check_stops(request: GenerationRequest) -> None:
    stops = stop_strings(request)
    _check_length("stop", stops, STOPS_MAX, "strings")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= STOP_CHARACTERS_MAX:
            raise RequestError(
                f"stop: string {index} has {len(stop)} characters, expected 1 to {STOP_CHARACTERS_MAX}",
                param="stop",
            )


def _check_length(name: str, value: Sized, most: int, unit: str) -> None:
    if len(value) > most:
        raise RequestError(f"{name}: at most {most} {unit} are allowed, got {len(value)}", param=name)


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _check_message(message: Message, path: str) -> None:
    if message.role not in ROLES:
        raise RequestError(
            f"{path}.role: must be one of {', '.join(ROLES)}, got {message.role!r}", param=f"{path}.role"
        )
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{path}.content: required, but missing", param=f"{path}.content")
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{path}.tool_calls: only messages of role 'assistant' have calls, this one is of {message.role!r}; leave them out",
            param=f"{path}.tool_calls",
        )
    for index, call in enumerate(message.tool_calls or ()):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            where = f"{path}.tool_calls[{index}].function.name"
            raise wrong(where, name, "the name of the function that was called")
    if not isinstance(message.content, list):
        return
    for index, part in enumerate(message.content):
        check_part(part, f"{path}.content[{index}]")
