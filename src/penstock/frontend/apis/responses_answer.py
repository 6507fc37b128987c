"""Answers of the Responses API, streamed or whole."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import PenstockError
from penstock.core.json_text import encode_json
from penstock.frontend.apis.bodies import ChatRequest, Message
from penstock.frontend.apis.chat import TokenEntry, token_entry
from penstock.frontend.apis.dialect import AnswerContext, ApiDialect, ClientTool, Usage, WholeBlocks
from penstock.frontend.apis.responses_body import INPUT, parse_responses, sealed
from penstock.frontend.errors import error_answer
from penstock.frontend.text.answer import Block, BlockKind, Blocks, BlockStep, TextEvent, TokenText

_PREFIX = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs"}
_CALL_PREFIX = {"function_call": "fc", "custom_tool_call": "ctc", "tool_search_call": "tsc"}
_FUNCTION_CALL = "function_call"


class ResponseStream:
    """Encodes an answer as the API's events."""

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._blocks = Blocks()
        self._sent = 0
        self._logprobs: Sequence[TokenText] = ()
        self._has_begun = False

    def event(self, event: TextEvent) -> bytes:
        self._logprobs = event.logprobs
        return self._begin() + b"".join(self._step(*step) for step in self._blocks.feed(event))

    def around_text(self, index: int) -> None:
        """Each event has more than text."""

    def end(self, usage: Usage) -> bytes:
        begun = self._begin()
        response = _response(self._context, self._blocks, usage)
        _remember(self._context, self._blocks, response)
        return begun + self._event(f"response.{response['status']}", {"response": response})

    def failure(self, error: PenstockError) -> bytes:
        body = error_answer(error).error
        fields = {"code": body.code or body.type, "message": body.message, "param": body.param}
        return self._event("error", fields)

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        response = _response(self._context, self._blocks, None)
        created = self._event("response.created", {"response": response})
        return created + self._event("response.in_progress", {"response": response})

    def _step(self, step: BlockStep, block: Block, text: str) -> bytes:
        place = {"item_id": _item_id(self._context, block), "output_index": block.index}
        part_place = {**place, "content_index": 0}
        name = {
            BlockKind.TEXT: "output_text",
            BlockKind.REASONING: "reasoning_text",
            BlockKind.CALL: "function_call_arguments",
        }[block.kind]
        tool = _tool_of(self._context, block)
        if step is BlockStep.ADDED:
            if tool.kind != _FUNCTION_CALL and block.kind is BlockKind.CALL:
                return b""  # given at its end: a text is in JSON until then
            if block.kind is BlockKind.CALL:
                return self._event(f"response.{name}.delta", {**place, "delta": text})
            fields = {**part_place, "delta": text}
            if block.kind is BlockKind.TEXT:
                fields["logprobs"] = _logprobs(self._context, self._logprobs)
            return self._event(f"response.{name}.delta", fields)
        status = "in_progress" if step is BlockStep.OPENED else _status(self._blocks, block)
        item = _item(self._context, block, status)
        if step is BlockStep.OPENED:
            if block.kind is not BlockKind.CALL:
                item["content"] = []
            added = self._event("response.output_item.added", {"output_index": block.index, "item": item})
            if block.kind is BlockKind.CALL:
                return added
            part = _part(self._context, block)
            return added + self._event("response.content_part.added", {**part_place, "part": part})
        if tool.kind == "custom_tool_call":
            name = "custom_tool_call_input"
            done = self._event(f"response.{name}.delta", {**place, "delta": item["input"]})
            done += self._event(f"response.{name}.done", {**place, "input": item["input"]})
        elif tool.kind == "tool_search_call":
            done = b""
        elif block.kind is BlockKind.CALL:
            done = self._event(f"response.{name}.done", {**place, "name": tool.name, "arguments": block.text})
        else:
            part = _part(self._context, block)
            fields = {**part_place, "text": block.text}
            if block.kind is BlockKind.TEXT:
                fields["logprobs"] = part["logprobs"]
            done = self._event(f"response.{name}.done", fields)
            done += self._event("response.content_part.done", {**part_place, "part": part})
        return done + self._event("response.output_item.done", {"output_index": block.index, "item": item})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        body = encode_json({"type": kind, "sequence_number": self._sent, **fields})
        self._sent += 1
        return f"event: {kind}\ndata: ".encode() + body + b"\n\n"


def _body(context: AnswerContext, blocks: Blocks, usage: Usage) -> bytes:
    """Encode a whole answer, and store it if it is to be stored."""
    response = _response(context, blocks, usage)
    _remember(context, blocks, response)
    return encode_json(response)


def _remember(context: AnswerContext, blocks: Blocks, response: dict[str, Any]) -> None:
    """Store the answer's message and its response object, if they are to be stored."""
    if context.remember is None:
        return
    message = Message(role="assistant", content="")
    for block in blocks.all:
        if block.kind is BlockKind.TEXT:
            message.content = f"{message.content}\n{block.text}" if message.content else block.text
        elif block.kind is BlockKind.REASONING:
            message.reasoning_content = (message.reasoning_content or "") + block.text
        else:
            call = {"name": block.name, "arguments": block.text}
            call_id = context.envelope.call_id(0, block.call)
            message.tool_calls = [
                *(message.tool_calls or []),
                {"id": call_id, "type": "function", "function": call},
            ]
    context.remember(message, encode_json(response))


def _response(context: AnswerContext, blocks: Blocks, usage: Usage | None) -> dict[str, Any]:
    """Make the response object; without `usage` the answer is still being written."""
    request, envelope, given = context.request, context.envelope, context.response
    assert isinstance(request, ChatRequest)
    assert given is not None, "of this dialect"
    is_cut = blocks.finish_reason == "length"
    status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
    return {
        "id": envelope.id,
        "object": "response",
        "created_at": envelope.created,
        "completed_at": int(wall_time_s()) if status == "completed" else None,
        "background": False,
        "status": status,
        "model": envelope.model,
        "output": []
        if usage is None
        else [_item(context, block, _status(blocks, block)) for block in blocks.all],
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": msgspec.Raw(given.instructions),
        "max_output_tokens": request.max_completion_tokens,
        "max_tool_calls": given.max_tool_calls,
        "metadata": msgspec.Raw(given.metadata),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": given.previous,
        "reasoning": {"effort": request.reasoning_effort, "summary": given.summary},
        "safety_identifier": given.safety_identifier,
        "service_tier": "default",
        "prompt_cache_key": given.prompt_cache_key,
        "prompt_cache_retention": given.prompt_cache_retention,
        "store": context.remember is not None,
        "temperature": context.sampling.temperature,
        "text": {"format": _format(request.response_format), "verbosity": request.verbosity},
        "top_logprobs": request.top_logprobs or 0,
        "tool_choice": msgspec.Raw(given.tool_choice),
        "tools": msgspec.Raw(given.tools),
        "top_p": context.sampling.top_p,
        "truncation": given.truncation,
        "usage": None if usage is None else _usage(usage),
        "user": given.user,
    }


def _status(blocks: Blocks, block: Block) -> str:
    """Give the status of a block that is over: that in which the answer was cut is incomplete, unless it is a whole call."""
    is_cut = blocks.cuts_call if block.kind is BlockKind.CALL else blocks.finish_reason == "length"
    return "incomplete" if is_cut and block is blocks.all[-1] else "completed"


def _format(form: dict[str, Any] | None) -> dict[str, Any]:
    """Give a chat's `response_format` as the API's `text.format`."""
    if form is None:
        return {"type": "text"}
    if form["type"] == "json_object":
        return form
    return {"type": form["type"], **form.get("json_schema", {})}


def _item(context: AnswerContext, block: Block, status: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": _item_id(context, block), "status": status}
    if block.kind is BlockKind.CALL:
        tool = _tool_of(context, block)
        item |= {"type": tool.kind, "call_id": context.envelope.call_id(0, block.call)}
        if tool.kind == "tool_search_call":
            return item | {"execution": "client", "arguments": block.arguments}
        item |= {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})
        if tool.kind == "custom_tool_call":
            return item | {"input": _input(block)}
        return item | {"arguments": block.text}
    if block.kind is BlockKind.REASONING:
        item |= {"type": "reasoning", "summary": [], "content": [_part(context, block)]}
        assert context.response is not None, "of this dialect"
        return item | ({"encrypted_content": sealed(block.text)} if context.response.seals else {})
    return item | {"type": "message", "role": "assistant", "content": [_part(context, block)]}


def _tool_of(context: AnswerContext, block: Block) -> ClientTool:
    """Give the tool that a block calls, as the client has it."""
    assert context.response is not None, "of this dialect"
    tool = context.response.client_tools.get(block.name)
    return tool or ClientTool(kind=_FUNCTION_CALL, name=block.name)


def _input(block: Block) -> str:
    """Give the text in the arguments of a custom tool's function; arguments of another form as they are."""
    said = block.arguments
    texts = [said[INPUT]] if INPUT in said else list(said.values())
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else block.text


def _part(context: AnswerContext, block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    logprobs = _logprobs(context, block.logprobs)
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}


def _logprobs(context: AnswerContext, tokens: Sequence[TokenText]) -> list[TokenEntry]:
    return [token_entry(token.logprob, context.token_bytes) for token in tokens]


def _item_id(context: AnswerContext, block: Block) -> str:
    is_call = block.kind is BlockKind.CALL
    prefix = _CALL_PREFIX[_tool_of(context, block).kind] if is_call else _PREFIX[block.kind]
    return f"{prefix}_{context.envelope.id.rpartition('_')[2]}{block.index}"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "cache_write_tokens": 0,  # of those that are billed; a prefix cache's are not
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


RESPONSES = ApiDialect("responses", "resp_", parse_responses, ResponseStream, partial(WholeBlocks, _body))
