"""Answers of the Anthropic API, streamed or whole."""

from functools import partial
from typing import Any

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.json_text import encode_json
from penstock.frontend.apis.dialect import AnswerContext, ApiDialect, Usage, WholeBlocks
from penstock.frontend.apis.messages_body import parse_count, parse_messages
from penstock.frontend.errors import shown_message
from penstock.frontend.text.answer import Block, BlockKind, Blocks, BlockStep, TextEvent

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageStream:
    """Encodes an answer as the API's events."""

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._blocks = Blocks()
        self._has_begun = False

    def event(self, event: TextEvent) -> bytes:
        encoded = b"" if self._has_begun else self._begin()
        return encoded + b"".join(self._step(*step) for step in self._blocks.feed(event))

    def around_text(self, index: int) -> None:
        """Each event has more than text."""

    def end(self, usage: Usage) -> bytes:
        encoded = b"" if self._has_begun else self._begin()
        reason, stopped_by = _stop(self._blocks)
        delta = {"stop_reason": reason, "stop_sequence": stopped_by}
        encoded += _event("message_delta", {"delta": delta, "usage": _usage(usage)})
        return encoded + _event("message_stop", {})

    def failure(self, error: PenstockError) -> bytes:
        return b"event: error\ndata: " + encode_json(error_body(error)) + b"\n\n"

    def _begin(self) -> bytes:
        self._has_begun = True
        usage = self._context.usage()
        message = _message(self._context, [], None, None, usage)
        return _event("message_start", {"message": message}) + _event("ping", {})

    def _step(self, step: BlockStep, block: Block, text: str) -> bytes:
        if step is BlockStep.CLOSED:
            return _event("content_block_stop", {"index": block.index})
        if step is BlockStep.OPENED:
            content = _content(block, self._context)
            if block.kind is BlockKind.CALL:
                content["input"] = {}
            return _event("content_block_start", {"index": block.index, "content_block": content})
        delta = {
            BlockKind.TEXT: {"type": "text_delta", "text": text},
            BlockKind.REASONING: {"type": "thinking_delta", "thinking": text},
            BlockKind.CALL: {"type": "input_json_delta", "partial_json": text},
        }[block.kind]
        return _event("content_block_delta", {"index": block.index, "delta": delta})


def _body(context: AnswerContext, blocks: Blocks, usage: Usage) -> bytes:
    """Encode a whole answer."""
    reason, stopped_by = _stop(blocks)
    content = [_content(block, context) for block in blocks.whole]
    return encode_json(_message(context, content, reason, stopped_by, usage))


class MessagesErrorInfo(msgspec.Struct):
    type: str
    message: str


class MessagesError(msgspec.Struct, kw_only=True):
    """An error of this API, as a body or an event."""

    type: str = "error"
    error: MessagesErrorInfo


def error_body(error: PenstockError) -> MessagesError:
    """Convert an error to the API's JSON."""
    kind = _ERRORS.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    return MessagesError(error=MessagesErrorInfo(kind, shown_message(error)))


def _stop(blocks: Blocks) -> tuple[str, str | None]:
    if blocks.stopped_by is not None:
        return "stop_sequence", blocks.stopped_by
    return _STOPS.get(blocks.finish_reason or "stop", "end_turn"), None


def _message(
    context: AnswerContext,
    content: list[dict[str, Any]],
    reason: str | None,
    stopped_by: str | None,
    usage: Usage,
) -> dict[str, Any]:
    return {
        "id": context.envelope.id,
        "type": "message",
        "role": "assistant",
        "model": context.envelope.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stopped_by,
        "usage": _usage(usage),
    }


def _content(block: Block, context: AnswerContext) -> dict[str, Any]:
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    call_id = context.envelope.call_id(0, block.call)
    return {"type": "tool_use", "id": call_id, "name": block.name, "input": block.arguments}


def _usage(usage: Usage) -> dict[str, Any]:
    """Give the token counts by the API's rule: `input_tokens` leave cached tokens out."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode_json({"type": kind, **fields}) + b"\n\n"


MESSAGES = ApiDialect("messages", "msg_", parse_messages, MessageStream, partial(WholeBlocks, _body))
COUNT_TOKENS = ApiDialect("count_tokens", "count_", parse_count)
