"""Encodes prompts to tokens and block hashes: pure functions, run on the event loop, in a thread or in an encoder process."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.core.errors import RequestError
from penstock.core.hashing import block_hashes
from penstock.core.types.cards import request_salt
from penstock.core.types.media import MediaPrompt
from penstock.core.wire import PackedHashes, PackedTokens, TokenArray, Wire, pack_hashes, pack_tokens
from penstock.frontend.errors import ContextLengthError
from penstock.frontend.openai.bodies import ChatRequest, CompletionRequest, GenerationRequest, Message
from penstock.frontend.openai.media import PART_TYPES, ContentPart, MediaPart, media_part, placeholders
from penstock.frontend.text.models import ServedModel

_UNREAD = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)


class Prompt(Wire, frozen=True):
    """One encoded prompt. A prompt too long for its model has no hashes, and none has one with `media`.

    Attributes:
        param: its field in the body.
        media: for which `token_ids` has placeholders; an engine has yet to expand it.
        expanded: what an engine has expanded in `token_ids`.
    """

    token_ids: PackedTokens
    block_hashes: PackedHashes
    param: str
    media: tuple[MediaPart, ...] = ()
    expanded: MediaPrompt | None = None


def encode_prompts(
    request: ChatRequest | CompletionRequest, model: ServedModel, hash_key: bytes
) -> tuple[Prompt, ...]:
    """Encode the prompts of a checked request (`validation.py`).

    Raises:
        RequestError: the template refuses the messages, a token id is out of range, a text is too long by `LengthBound`, or
            media are broken or not for this model.
    """
    media: tuple[MediaPart, ...] = ()
    salt = request_salt(model.card.salt, request.cache_salt)
    if isinstance(request, ChatRequest):
        media = _media(request, model)
        encoded, param = [encode_chat(model, request.messages, request.chat_template_kwargs)], "messages"
    else:
        encoded, param = _encode_texts(request, model), "prompt"
    return tuple(
        Prompt(
            token_ids=pack_tokens(token_ids),
            block_hashes=pack_hashes(block_hashes(token_ids, model.card.block_size, salt, key=hash_key))
            if len(token_ids) < model.card.context_length and not media
            else PackedHashes(b""),
            param=param,
            media=media,
        )
        for token_ids in encoded
    )


def without_prompts(request: GenerationRequest) -> GenerationRequest:
    """Copy a request without its prompts."""
    changes: dict[str, Any] = dict.fromkeys(_UNREAD)
    if isinstance(request, ChatRequest):
        changes |= {"messages": [], "chat_template_kwargs": None, "parallel_tool_calls": None}
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
    if model.template is None:
        raise RequestError(
            f"messages: model {model.card.name!r} has no chat template; use /v1/completions", param="messages"
        )
    text = model.template.render([_message(message, model) for message in messages], arguments)
    return _encode(model, text, "messages", special=False)  # the template adds the special tokens


def encode_text(model: ServedModel, text: str) -> TokenArray:
    """Tokenize the prompt of a completion; raises RequestError where it is too long by `LengthBound`."""
    return _encode(model, text, "prompt", special=True)


def _media(request: ChatRequest, model: ServedModel) -> tuple[MediaPart, ...]:
    """Decode the media of all messages."""
    taken = {kind.modality for kind in model.card.media}
    found = []
    for number, message in enumerate(request.messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type == "text":
                continue
            where = f"messages[{number}].content[{index}]"
            if (modality := PART_TYPES[part.type]) not in taken:
                raise RequestError(
                    f"{where}.type: {part.type!r} is not supported: model {model.card.name!r} takes"
                    f" {', '.join(['text', *sorted(taken)])} where it runs, no {modality}; leave it out, or serve a model that"
                    " takes it with an engine that does, such as vllm",
                    param=f"{where}.type",
                )
            found.append(media_part(part, where))
    return tuple(found)


def _message(message: Message, model: ServedModel) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": _content(message.content, model)}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return fields


def _content(
    content: str | list[ContentPart] | None, model: ServedModel
) -> str | list[dict[str, str]] | None:
    """Make a content of the form that the template takes, as vLLM chooses it."""
    template = model.template
    assert template is not None, "checked"
    if content is None or (isinstance(content, str) and (template.takes_strings or not template.takes_parts)):
        return content
    parts = [ContentPart(type="text", text=content)] if isinstance(content, str) else content
    if template.takes_parts:
        return [
            {"type": "text", "text": part.text or ""}
            if part.type == "text"
            else {"type": PART_TYPES[part.type]}
            for part in parts
        ]
    text = "\n".join(part.text or "" for part in parts if part.type == "text")
    modalities = [PART_TYPES[part.type] for part in parts if part.type != "text"]
    return placeholders(modalities, text, {kind.modality: kind.placeholder for kind in model.card.media})


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Decode a tool call's arguments from JSON text (the API) to an object (templates)."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _encode_texts(request: CompletionRequest, model: ServedModel) -> list[TokenArray]:
    prompt: Any = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    return [encode_text(model, item) if isinstance(item, str) else _check_ids(item, model) for item in prompt]


def _encode(model: ServedModel, text: str, param: str, *, special: bool) -> TokenArray:
    context_length = model.card.context_length
    if len(text) > context_length and (least := model.length_bound.tokens_min(text)) >= context_length:
        raise ContextLengthError(
            f"{param}: {len(text.encode())} bytes are at least {least} tokens and do not fit the model's context of "
            f"{context_length}, which has to hold the answer too; shorten them",
            param=param,
        )
    # Only the batch calls release the GIL; the fast one skips character offsets.
    (encoding,) = model.tokenizer.encode_batch_fast([text], add_special_tokens=special)
    return np.array(encoding.ids, dtype=np.int32)


def _check_ids(token_ids: list[int], model: ServedModel) -> TokenArray:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < model.num_token_ids:
            raise RequestError(
                f"prompt: token ids must be >= 0 and < {model.num_token_ids}, got {token_id}", param="prompt"
            )
    return np.array(token_ids, dtype=np.int32)
