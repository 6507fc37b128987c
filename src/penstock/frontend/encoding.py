"""Encodes prompts to tokens and block hashes: pure functions, run on the event loop, in a thread or in an encoder process."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import msgspec
import numpy as np

from penstock.core.errors import RequestError
from penstock.core.hashing import block_hashes
from penstock.core.log import get_logger
from penstock.core.types.instances import request_salt
from penstock.core.types.requests import MediaPrompt
from penstock.core.wire import PackedHashes, PackedTokens, TokenArray, Wire, pack_hashes, pack_tokens
from penstock.frontend.apis.bodies import (
    FORMATTED_PROMPT,
    PART_TYPES,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    GenerationRequest,
    MediaPart,
    Message,
    annotations_of,
    media_part,
    placeholders,
)
from penstock.frontend.apis.checks import offered_tools
from penstock.frontend.apis.decoding import name_once
from penstock.frontend.apis.dialect import ParsedBody
from penstock.frontend.apis.responses_store import answer_room, fitting_messages
from penstock.frontend.errors import ContextLengthError
from penstock.frontend.text.models import ServedModel
from penstock.frontend.text.template import THINKING_SWITCHES, ChatTemplate

NOISE = ("x-anthropic-billing-header:",)
"""Beginnings of lines at the head of a system message that are not for the model: what Claude Code is billed by."""
SYSTEM = ("system", "developer")
_HEAD_CHARACTERS = 256
_REST_CHARACTERS = 1024
_SHORTEST = 2048
"""Characters of a system message from which on its head is watched: less is computed soon."""
_HEADS_TOLD = 3
"""Different heads of one rest at which they are reported; two have users who changed the text."""
_RESTS_MAX = 512

_log = get_logger()


class PromptHead(Wire, frozen=True):
    """The head of a system message, and a digest of how it ends."""

    text: str
    rest: bytes


def without_noise(content: str | list[ContentPart]) -> str | list[ContentPart]:
    """Leave lines of `NOISE` out of the head of a system message's content."""
    if isinstance(content, str):
        while content.startswith(NOISE):
            content = content.partition("\n")[2]
        return content
    if not content or not (content[0].text or "").startswith(NOISE):
        return content
    text = without_noise(content[0].text or "")
    return [ContentPart(type="text", text=str(text)), *content[1:]] if text else without_noise(content[1:])


def head_of(messages: Sequence[Message]) -> PromptHead | None:
    """Give the head of a chat's system message; None if it has no long one."""
    content = messages[0].content if messages and messages[0].role in SYSTEM else None
    if isinstance(content, list):
        content = "\n".join(part.words or "" for part in content)
    if content is None or len(content) < _SHORTEST:
        return None
    content = str(without_noise(content))
    rest = content[-_REST_CHARACTERS:].encode("utf-8", "surrogatepass")
    return PromptHead(text=content[:_HEAD_CHARACTERS], rest=blake2b(rest, digest_size=16).digest())


class ChangingHeads:
    """Tells of system messages that end alike and begin otherwise with each request. One event loop owns it."""

    def __init__(self, count: Callable[[str], None]) -> None:
        """Count changed heads by `count`, which gets the model's name."""
        self._count = count
        self._heads: OrderedDict[tuple[str, str, bytes], list[str]] = OrderedDict()

    def saw(self, model: str, tenant: str, head: PromptHead) -> None:
        """Take the head of a prompt; at the third one of its kind the log says where they differ."""
        key = (model, tenant, head.rest)
        heads = self._heads.setdefault(key, [])
        self._heads.move_to_end(key)
        if len(self._heads) > _RESTS_MAX:
            self._heads.popitem(last=False)
        if head.text in heads:
            return
        was_told = len(heads) == _HEADS_TOLD
        if was_told:
            heads.pop()
        heads.append(head.text)
        if len(heads) == _HEADS_TOLD:
            self._count(model)
        if len(heads) == _HEADS_TOLD and not was_told:
            _log.warning(
                "prompt_head_changes",
                model=model,
                tenant=tenant,
                same_characters=len(
                    [*takewhile(lambda each: len(set(each)) == 1, zip(*heads, strict=False))]
                ),
                fix="have the client send what changes at the end: from the first character that differs no KV is reused",
            )


_UNREAD = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
_THINKING_BUDGETS = frozenset({"thinking_budget", "thinking_token_budget"})
"""Variables of templates that bound reasoning, in tokens."""
_NO_EFFORT = ("none", "minimal")


class EncodedPrompt(Wire, frozen=True):
    """One encoded prompt. A prompt too long for its model has no hashes, and none has one with `media`.

    Attributes:
        param: its field in the body.
        media: for which `token_ids` has placeholders; an engine has yet to expand it.
        expanded: what an engine has expanded in `token_ids`.
        in_reasoning: it has begun the model's reasoning.
        head: of a chat's system message.
        text: of the prompt, where the answer repeats it: an echo, or an annotation of a chat.
        text_bytes: of `text` as a JSON string, in which some characters take six bytes.
    """

    token_ids: PackedTokens
    block_hashes: PackedHashes
    param: str
    media: tuple[MediaPart, ...] = ()
    expanded: MediaPrompt | None = None
    in_reasoning: bool = False
    text: str = ""
    text_bytes: int = 0
    head: PromptHead | None = None


def encode_prompts(
    request: ChatRequest | CompletionRequest, model: ServedModel, hash_key: bytes
) -> tuple[EncodedPrompt, ...]:
    """Encode the prompts of a checked request (`checks.py`).

    Raises:
        RequestError: the template refuses the messages, a token id is out of range, a text is too long by `LengthBound`, or
            media are broken or not for this model.
    """
    media: tuple[MediaPart, ...] = ()
    in_reasoning, text = False, ""
    salt = request_salt(model.card.salt, request.cache_salt)
    head = None
    if isinstance(request, ChatRequest):
        head = head_of(request.messages)
        media = _media(request, model)
        text = _render(request, model)
        in_reasoning = model.format.reasoning is not None and model.format.reasoning.is_open(text)
        encoded = [_encode(model, text, "messages", special=bool(request.add_special_tokens))]
        param = "messages"
    else:
        encoded, param = _encode_texts(request, model), "prompt"
    texts = [text if _shows_text(request) else ""] * len(encoded)
    if isinstance(request, CompletionRequest) and request.echo:
        texts = _texts(request, encoded, model)
    return tuple(
        EncodedPrompt(
            token_ids=pack_tokens(token_ids),
            block_hashes=pack_hashes(block_hashes(token_ids, model.card.block_size, salt, key=hash_key))
            if len(token_ids) < model.card.context_length and not media
            else PackedHashes(b""),
            param=param,
            media=media,
            in_reasoning=in_reasoning,
            head=head,
            text=text,
            text_bytes=len(msgspec.json.encode(text)) if text else 0,
        )
        for token_ids, text in zip(encoded, texts, strict=True)
    )


Encoding = Callable[[ChatRequest | CompletionRequest, ServedModel, bytes], tuple[EncodedPrompt, ...]]


def encoding_of(parsed: ParsedBody) -> Encoding:
    """Give what encodes the prompts of a body: `encode_prompts`, or what first leaves out messages that do not fit."""
    fields = parsed.response
    return encode_prompts if fields is None or fields.truncation != "auto" else _encode_fitting


def _encode_fitting(
    request: ChatRequest | CompletionRequest, model: ServedModel, hash_key: bytes
) -> tuple[EncodedPrompt, ...]:
    """Take messages that are too many for the model out of a chat, and encode the others."""
    assert isinstance(request, ChatRequest)
    _media(request, model)  # errors in messages that are left out name them all the same

    def size_of(messages: Sequence[Message]) -> int | None:
        shorter = msgspec.structs.replace(request, messages=list(messages))
        try:
            return len(_encode(model, _render(shorter, model), "messages", special=False))
        except RequestError:
            return None

    def count_of(message: Message) -> int:
        try:
            return len(_encode(model, _said(message), "messages", special=False))
        except ContextLengthError:
            return model.card.context_length

    limit = request.max_completion_tokens or request.max_tokens
    most = model.card.context_length - answer_room(limit, model.card.context_length)
    if most > 0:
        request.messages = fitting_messages(request.messages, most, size_of, count_of)
    return encode_prompts(request, model, hash_key)


def _said(message: Message) -> str:
    """Give the text of a message, however the template writes it."""
    content = message.content or ""
    texts = [content] if isinstance(content, str) else [part.words or "" for part in content]
    calls = [str(call.get("function")) for call in message.tool_calls or ()]
    return "\n".join([*texts, message.reasoning_content or "", *calls])


def _shows_text(request: GenerationRequest) -> bool:
    """Tell whether a chat's answer shows its rendered prompt."""
    return request.nvext is not None and FORMATTED_PROMPT in annotations_of(request)


def without_prompts(request: GenerationRequest) -> GenerationRequest:
    """Copy a request without its prompts."""
    changes: dict[str, Any] = dict.fromkeys(_UNREAD)
    if isinstance(request, ChatRequest):
        changes |= {"messages": [], "chat_template_kwargs": None, "documents": None}
    else:
        changes["prompt"] = ""
    return msgspec.structs.replace(request, **changes)


def encode_chat(
    model: ServedModel, messages: Sequence[Message], arguments: dict[str, Any] | None = None
) -> TokenArray:
    """Render messages by the model's chat template, with more variables for it, and tokenize them.

    Raises:
        RequestError: the template refuses the messages, or they are too long by `LengthBound`.
    """
    template = _template(model, has_tools=bool(arguments and arguments.get("tools")))
    text = template.prompt([_message(message, template, model) for message in messages], arguments)
    return _encode(model, text, "messages", special=False)  # the template adds the special tokens


def template_arguments(request: ChatRequest, model: ServedModel) -> dict[str, Any]:
    """Give the variables that a chat sets for its template."""
    arguments = dict(request.chat_template_kwargs or {})
    if request.documents is not None:
        arguments["documents"] = request.documents
    if request.add_generation_prompt is not None:
        arguments["add_generation_prompt"] = request.add_generation_prompt
    tools, effort = offered_tools(request), request.reasoning_effort
    template = None if model.templates is None else model.templates.of(tools=bool(tools))
    if tools and template is not None:
        if "tools" not in template.variables:
            raise RequestError(
                f"the chat template of model {model.card.name!r} has no place for them; leave them out, or send"
                ' tool_choice: "none"',
                field="tools",
            )
        arguments["tools"] = tools
    if effort is not None and template is not None:
        if "reasoning_effort" in template.variables:
            arguments.setdefault("reasoning_effort", effort)
        for switch in THINKING_SWITCHES & template.variables:
            arguments.setdefault(switch, effort not in _NO_EFFORT)
    if template is not None:
        _set_thinking(arguments, request, template, model)
        _name_unread(request, template)
    return arguments


def _name_unread(request: ChatRequest, template: ChatTemplate) -> None:
    """Log once what a chat says for its template and the template does not read."""
    reads = template.variables | (
        THINKING_SWITCHES if THINKING_SWITCHES & template.variables else frozenset()
    )
    for name in (request.chat_template_kwargs or {}).keys() - reads:
        name_once(f"chat_template_kwargs.{name}")
    if request.documents is not None and "documents" not in reads:
        name_once("documents")
    if request.reasoning_effort is not None and not reads & {"reasoning_effort", *THINKING_SWITCHES}:
        name_once("reasoning_effort")


def _set_thinking(
    arguments: dict[str, Any], request: ChatRequest, template: ChatTemplate, model: ServedModel
) -> None:
    """Turn reasoning on or off, and bound it.

    Raises:
        RequestError: the template cannot, or `chat_template_kwargs` or another field says otherwise.
    """
    budget = request.thinking_token_budget
    if budget is not None and (names := _THINKING_BUDGETS & template.variables):
        arguments |= dict.fromkeys(names, budget)
        budget = None
    for field, value in (("enable_thinking", request.enable_thinking), ("thinking_token_budget", budget)):
        if value is None:
            continue
        if not template.thinking_switches or (field == "thinking_token_budget" and value):
            cannot = "bound reasoning" if value and value is not True else "turn reasoning on or off"
            raise RequestError(
                f"the chat template of model {model.card.name!r} cannot {cannot}; leave it out",
                field=field,
            )
        for switch in template.thinking_switches:
            if arguments.setdefault(switch, bool(value)) != bool(value):
                raise RequestError(
                    f"got {value!r}, but another field sets {switch} to {arguments[switch]!r}; send one of them",
                    field=field,
                )


def encode_text(model: ServedModel, text: str, *, special: bool = True) -> TokenArray:
    """Tokenize the prompt of a completion, with the model's special tokens around it or not.

    Raises:
        RequestError: it is too long by `LengthBound`.
    """
    return _encode(model, text, "prompt", special=special)


def _render(request: ChatRequest, model: ServedModel) -> str:
    """Make the text of a chat's prompt."""
    arguments = template_arguments(request, model)
    template = _template(model, has_tools="tools" in arguments)
    messages = [_message(message, template, model) for message in request.messages]
    return template.prompt(messages, arguments, continues=bool(request.continue_final_message))


def _template(model: ServedModel, *, has_tools: bool) -> ChatTemplate:
    if model.templates is None:
        raise RequestError(
            f"model {model.card.name!r} has no chat template; use /v1/completions", field="messages"
        )
    return model.templates.of(tools=has_tools)


def _media(request: ChatRequest, model: ServedModel) -> tuple[MediaPart, ...]:
    """Decode the media of all messages."""
    taken = {kind.modality for kind in model.card.media}
    found = []
    for number, message in enumerate(request.messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.words is not None:
                continue
            where = f"messages[{number}].content[{index}]"
            if (modality := PART_TYPES[part.type]) not in taken:
                raise RequestError(
                    f"{part.type!r} is not supported: model {model.card.name!r} takes"
                    f" {', '.join(['text', *sorted(taken)])} where it runs, no {modality}; leave it out, or serve a model that"
                    " takes it with an engine that does, such as vllm",
                    field=f"{where}.type",
                )
            found.append(media_part(part, where))
    return tuple(found)


def _message(message: Message, template: ChatTemplate, model: ServedModel) -> dict[str, Any]:
    content = message.content if message.content is not None else message.refusal or ""
    if message.role in SYSTEM:
        content = without_noise(content)
    fields: dict[str, Any] = {"role": message.role, "content": _content(content, template, model)}
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if not content:  # gpt-oss refuses one of the two
            fields["thinking"] = reasoning
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return fields


def _content(
    content: str | list[ContentPart], template: ChatTemplate, model: ServedModel
) -> str | list[dict[str, str]]:
    """Make a content of the form that the template takes, as vLLM chooses it."""
    if isinstance(content, str) and (template.takes_strings or not template.takes_parts):
        return content
    parts = [ContentPart(type="text", text=content)] if isinstance(content, str) else content
    if template.takes_parts:
        return [
            {"type": "text", "text": words}
            if (words := part.words) is not None
            else {"type": PART_TYPES[part.type]}
            for part in parts
        ]
    text = "\n".join(words for part in parts if (words := part.words) is not None)
    modalities = [PART_TYPES[part.type] for part in parts if part.words is None]
    return placeholders(modalities, text, {kind.modality: kind.placeholder for kind in model.card.media})


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Decode a tool call's arguments from JSON text (the API) to an object (templates).

    Arguments that are none, as of another server's broken call, are the object's one value `arguments`.
    """
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = msgspec.json.decode(arguments.strip() or "{}")
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments} if arguments else {}
    return {**call, "function": {**function, "arguments": arguments}}


def _encode_texts(request: CompletionRequest, model: ServedModel) -> list[TokenArray]:
    prompt: Any = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    special = request.add_special_tokens is not False
    return [
        encode_text(model, item, special=special) if isinstance(item, str) else _check_ids(item, model)
        for item in prompt
    ]


def _texts(request: CompletionRequest, encoded: Sequence[TokenArray], model: ServedModel) -> list[str]:
    """Give the prompts' texts, as they came or as their token ids decode."""
    prompt: Any = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if isinstance(prompt[0], str):
        return list(prompt)
    texts = []
    for token_ids in encoded:
        decoder = model.detokenizer.stream(begins_text=True)
        texts.append(decoder.feed(token_ids.tolist()) + decoder.finish())
    return texts


def _encode(model: ServedModel, text: str, param: str, *, special: bool) -> TokenArray:
    context_length = model.card.context_length
    if len(text) > context_length and (least := model.length_bound.tokens_min(text)) >= context_length:
        raise ContextLengthError(
            f"{len(text.encode())} bytes are at least {least} tokens and do not fit the model's context of "
            f"{context_length}, which has to hold the answer too; shorten them",
            field=param,
        )
    return model.words.encode(text, special=special)


def _check_ids(token_ids: list[int], model: ServedModel) -> TokenArray:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < model.num_token_ids:
            raise RequestError(
                f"token ids must be >= 0 and < {model.num_token_ids}, got {token_id}", field="prompt"
            )
    return np.array(token_ids, dtype=np.int32)
