"""Bodies of the Responses API as the frontend's own requests."""

from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.client_fields import ClientFields, Origin
from penstock.frontend.openai.agents import take_peer_fields
from penstock.frontend.openai.bodies import ChatRequest, Message, parse_body
from penstock.frontend.openai.dialect import ClientTool, ParsedBody, ResponseFields, names_of
from penstock.frontend.openai.validation import check_chat
from penstock.frontend.responses.bodies import (
    ENCRYPTED,
    LOGPROBS,
    ResponsesRequest,
    TextFormat,
    decode_responses,
)
from penstock.frontend.responses.items import Conversation
from penstock.frontend.responses.tools import Tools

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "token_ids": "input",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}


def parse_responses(body: bytes) -> ParsedBody:
    """Decode a body of `/v1/responses`.

    Raises:
        RequestError: it is malformed.
    """
    given = parse_body(body, ResponsesRequest, decode_responses)
    if given.truncation not in {None, "auto", "disabled"}:
        raise RequestError(
            f"truncation: must be 'auto' or 'disabled', got {given.truncation[:40]!r}", param="truncation"
        )
    messages = [] if given.instructions is None else [Message(role="system", content=given.instructions)]
    instructions = len(messages)
    origins = [Origin(field="instructions", content="instructions")] * instructions
    said = Conversation(given.input)
    for message, origin in said.messages():
        messages.append(message)
        origins.append(origin)
    tools = Tools()
    for index, tool in enumerate(given.tools or ()):
        tools.add(tool, f"tools[{index}]")
    for tool, where in said.loaded:
        tools.add(tool, where)
    request = ChatRequest(
        model=given.model,
        messages=messages,
        stream=given.stream,
        max_completion_tokens=given.max_output_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        tools=tools.all or None,
        tool_choice=tools.choice(given.tool_choice),
        parallel_tool_calls=given.parallel_tool_calls,
        chat_template_kwargs=given.chat_template_kwargs,
        session=given.session,
        agent_hints=given.agent_hints,
        nvext=given.nvext,
    )
    given.extend(request)
    if given.top_logprobs is not None or (isinstance(given.include, list) and LOGPROBS in given.include):
        request.logprobs, request.top_logprobs = True, given.top_logprobs or 0
    if given.reasoning is not None:
        request.reasoning_effort = given.reasoning.effort
    if given.text is not None:
        request.verbosity = given.text.verbosity
        request.response_format = _format(given.text.format)
    take_peer_fields(request)
    names = names_of(request) | _NAMES
    if "response_format" not in names:
        names |= {"response_format.json_schema": "text.format", "response_format": "text.format"}
    fields = ClientFields(names=names, messages=tuple(origins), tools="parameters")
    repeated = _repeated(given, tools.of_client)
    return ParsedBody(request, repeated, instructions, stores=given.store is not False, fields=fields)


def _repeated(given: ResponsesRequest, client_tools: dict[str, ClientTool]) -> ResponseFields:
    return ResponseFields(
        previous=given.previous_response_id,
        instructions=msgspec.json.encode(given.instructions),
        metadata=msgspec.json.encode(given.metadata or {}),
        truncation=given.truncation or "disabled",
        summary=None if given.reasoning is None else given.reasoning.summary,
        max_tool_calls=given.max_tool_calls,
        prompt_cache_key=given.prompt_cache_key,
        prompt_cache_retention=given.prompt_cache_retention,
        safety_identifier=given.safety_identifier,
        user=given.user,
        tools=msgspec.json.encode(given.tools or []),
        tool_choice=msgspec.json.encode(given.tool_choice or "auto"),
        client_tools=client_tools,
        seals=isinstance(given.include, list) and ENCRYPTED in given.include,
    )


def check_responses(parsed: ParsedBody, choices_max: int) -> None:
    """Raises: RequestError: a value is out of its range."""
    assert isinstance(parsed.request, ChatRequest)
    check_chat(parsed.request, choices_max)


def _format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema":
        named = {"name": form.name or "answer", "description": form.description, "schema": form.schema}
        return {"type": "json_schema", "json_schema": named | {"strict": form.strict}}
    return {"type": form.type} | ({} if form.schema is None else {"schema": form.schema})
