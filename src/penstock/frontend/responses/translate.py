"""Bodies of the Responses API as the frontend's own requests."""

from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.client_fields import ClientFields, Origin
from penstock.frontend.openai.agents import take_peer_fields
from penstock.frontend.openai.bodies import ChatRequest, Message, parse_body
from penstock.frontend.openai.dialect import ParsedBody, ResponseFields, names_of
from penstock.frontend.openai.media import ContentPart, MediaUrl
from penstock.frontend.openai.validation import check_chat
from penstock.frontend.responses.bodies import (
    LOGPROBS,
    InputItem,
    InputPart,
    ResponsesRequest,
    TextFormat,
    decode_responses,
)

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "token_ids": "input",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text")


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
    messages += _messages(given.input, origins)
    request = ChatRequest(
        model=given.model,
        messages=messages,
        stream=given.stream,
        max_completion_tokens=given.max_output_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        tools=None if given.tools is None else [_tool(tool) for tool in given.tools],
        tool_choice=_choice(given.tool_choice),
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
    return ParsedBody(request, _repeated(given), instructions, stores=given.store is not False, fields=fields)


def _repeated(given: ResponsesRequest) -> ResponseFields:
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
    )


def check_responses(parsed: ParsedBody, choices_max: int) -> None:
    """Raises: RequestError: a value is out of its range."""
    assert isinstance(parsed.request, ChatRequest)
    check_chat(parsed.request, choices_max)


def _messages(given: str | list[InputItem], origins: list[Origin]) -> list[Message]:
    """Give the messages of an input; calls and reasoning belong to the assistant's message before or after them.

    Adds the origin of each message to `origins`.
    """
    if isinstance(given, str):
        origins.append(Origin(field="input", content="input"))
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    reasoning = ""
    for index, item in enumerate(given):
        where = f"input[{index}]"
        origin = Origin(field=where, content=f"{where}.content", has_parts=True)
        if item.type == "message":
            if item.role is None:
                raise RequestError(f"{where}.role: required, but missing", param=f"{where}.role")
            message = Message(role=item.role, content=_content(item.content, origin.content))
            if item.role == "assistant":
                message.reasoning_content, reasoning = reasoning or None, ""
            messages.append(message)
            origins.append(origin)
        elif item.type == "function_call":
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant", content="", reasoning_content=reasoning or None))
                origins.append(origin)
                reasoning = ""
            call = {"name": item.name, "arguments": item.arguments}
            said = messages[-1]
            said.tool_calls = said.tool_calls or []
            said.tool_calls.append({"id": item.call_id, "type": "function", "function": call})
        elif item.type == "function_call_output":
            content = _content(item.output, f"{where}.output")
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=content))
            origins.append(Origin(field=where, content=f"{where}.output", has_parts=True))
        elif item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            reasoning += "".join(part.text for part in parts)
        else:
            raise RequestError(
                f"{where}.type: must be one of message, function_call, function_call_output, reasoning, got {item.type[:40]!r}",
                param=f"{where}.type",
            )
    return messages


def _content(content: str | list[InputPart] | None, where: str) -> str | list[ContentPart]:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if all(part.type == "text" for part in parts):
        return "\n".join(part.text or "" for part in parts)
    return parts


def _part(part: InputPart, where: str) -> ContentPart:
    if part.type in _TEXTS:
        return ContentPart(type="text", text=part.text)
    if part.type == "refusal":
        return ContentPart(type="text", text=part.refusal)
    if part.type == "input_image" and part.image_url is not None:
        return ContentPart(type="image_url", image_url=MediaUrl(url=part.image_url))
    raise RequestError(
        f"{where}.type: {part.type[:40]!r} is not supported; send input_text, output_text, refusal, or input_image with an"
        " image_url",
        param=f"{where}.type",
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Nest a tool as chats have it."""
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": tool.get("type"), "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict) or "function" in choice:
        return choice
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema":
        named = {"name": form.name or "answer", "description": form.description, "schema": form.schema}
        return {"type": "json_schema", "json_schema": named | {"strict": form.strict}}
    return {"type": form.type}
