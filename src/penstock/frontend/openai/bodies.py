"""Request bodies of the OpenAI API, as far as Penstock serves it.

Unsupported fields that would change the answer are declared too, so that a request with one is refused by name
(`validation.py`) and never answered wrongly.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from penstock.frontend.openai.agents import (
    AgentHintsBody,
    PeerBody,
    RetentionBody,
    SessionBody,
    take_peer_fields,
)
from penstock.frontend.openai.body_error import body_error, check_levels, without_half_pairs
from penstock.frontend.openai.lenient import decode_leniently, name_once
from penstock.frontend.openai.media import ContentPart

_Request = TypeVar("_Request", bound=msgspec.Struct)

STOPS_MAX = 16
_SMALL_BYTES = 16_384
"""Bodies up to here have too few objects for more than one collection while they are decoded."""
STOP_CHARACTERS_MAX = 1024


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of request bodies: an unknown field is an error, unless it has no effect (`lenient.py`)."""


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None  # accepted, no effect


class SamplingExtensions(Body, kw_only=True):
    """Fields beyond those of any API's own, with the names vLLM and SGLang use. None: not given."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    seed: int | None = None

    def extend(self, request: "SamplingExtensions") -> None:
        """Copy these fields to a request."""
        for name in SamplingExtensions.__struct_fields__:
            setattr(request, name, getattr(self, name))


class GenerationRequest(SamplingExtensions, kw_only=True):
    """Fields of both chat and text completions. None: not given."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    temperature: float | None = None
    response_format: Any = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    structured_outputs: Any = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    add_special_tokens: bool | None = None
    strict: bool | None = None  # true: unknown fields are refused, whatever their value
    # What agents say (`agents.py`).
    session: SessionBody | None = None
    kv_retention: RetentionBody | None = None
    agent_hints: AgentHintsBody | None = None
    nvext: PeerBody | None = None
    # Accepted, no effect on the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class Message(msgspec.Struct, kw_only=True):
    """One message; unknown fields, such as those copied from an earlier answer, are ignored."""

    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name for the same
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Accepted, no effect on the answer.
    prediction: Any = None
    verbosity: Any = None
    # Refused unless they ask for nothing.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class ContinuationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Says that an answer goes on: the last `num_emitted` tokens of the prompt are its own, of choice `choice` of its request."""

    num_emitted: int
    choice: int = 0


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    continuation: ContinuationBody | None = None
    best_of: int | None = None
    suffix: Any = None  # refused unless it asks for nothing

    @property
    def answers_per_prompt(self) -> int:
        """Answers to make for each prompt; `n` of them are given."""
        return max(self.n or 1, self.best_of or 1)


_decode_chat = msgspec.json.Decoder(ChatRequest).decode
_decode_completion = msgspec.json.Decoder(CompletionRequest).decode


def parse_chat(body: bytes) -> ChatRequest:
    """Decode a chat request; `validation.check_chat` checks its values.

    Raises:
        RequestError: not JSON, a wrong type, a missing or an unknown field, or one that `nvext` contradicts.
    """
    request = parse_body(body, ChatRequest, _decode_chat)
    take_peer_fields(request)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Decode a completion request; `validation.check_completion` checks its values.

    Raises:
        RequestError: not JSON, a wrong type, a missing or an unknown field, or one that `nvext` contradicts.
    """
    request = parse_body(body, CompletionRequest, _decode_completion)
    take_peer_fields(request)
    return request


def parse_body(body: bytes, kind: type[_Request], decode: Callable[[bytes], _Request]) -> _Request:
    """Decode a body of any API.

    Raises:
        RequestError: not JSON, a wrong type, a missing or an unknown field.
    """
    try:
        check_levels(body)
        if len(body) <= _SMALL_BYTES:
            return _decode(body, kind, decode)
        with _no_collections():
            return _decode(body, kind, decode)
    except (ValueError, RecursionError) as error:
        raise body_error(error, body, kind) from error


def _decode(body: bytes, kind: type[_Request], decode: Callable[[bytes], _Request]) -> _Request:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        return decode_leniently(body, kind, error)
    except msgspec.DecodeError:
        whole = without_half_pairs(body)
        if whole == body:
            raise
        request = _decode(whole, kind, decode)
        if getattr(request, "strict", None) is True:
            raise
        name_once("half of a surrogate pair")
        return request


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Pause garbage collection while decoding: it would scan the body's growing lists repeatedly and make decoding 4 times slower."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
