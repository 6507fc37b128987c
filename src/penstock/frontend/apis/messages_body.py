"""Bodies of the Anthropic API, and their translation to the frontend's own requests."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.apis.bodies import ChatRequest, ContentPart, MediaUrl, Message, SamplingExtensions
from penstock.frontend.apis.decoding import name_once, parse_body
from penstock.frontend.apis.dialect import ParsedBody, names_of
from penstock.frontend.errors import ClientFields, FieldOrigin


class MessagesSource(msgspec.Struct, kw_only=True):
    """Where the content of an image or a document is."""

    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: "str | list[ContentBlock] | None" = None


class ContentBlock(msgspec.Struct, kw_only=True):
    """Any block of a message; unknown fields, such as `cache_control` and `signature`, are ignored."""

    type: str
    text: str = ""
    thinking: str = ""
    title: str | None = None
    source: MessagesSource | str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    tool_name: str = ""  # of a tool_reference
    content: "str | list[ContentBlock] | None" = None
    is_error: bool | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentBlock]


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: int | None = None  # accepted, no effect: templates have no such bound
    display: str | None = None


class MessagesOutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: MessagesOutputFormat | None = None


class CountRequest(SamplingExtensions, kw_only=True):
    """Body of `/v1/messages/count_tokens`: what makes up a prompt."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: MessagesOutputFormat | None = None
    # Accepted, no effect on the answer.
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    speed: Any = None
    strict: bool | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    # Accepted, no effect on the answer.
    metadata: Any = None
    service_tier: Any = None


decode_messages = msgspec.json.Decoder(MessagesRequest).decode
decode_count = msgspec.json.Decoder(CountRequest).decode


_NAMES = {
    "prompt": "messages",
    "token_ids": "messages",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "reasoning_effort": "output_config.effort",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice": "tool_choice",
}
_ROLES = ("user", "assistant", "system")
_OF_OTHERS = frozenset(
    {"redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_listing", "fallback"}
)
"""Blocks of what another server did, or can alone read; so are all results of tools but `tool_result`. They are left out."""
_ERROR = "Error: "
"""Before the result of a tool that failed."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse_messages(body: bytes) -> ParsedBody:
    """Decode a body of `/v1/messages`.

    Raises:
        RequestError: it is malformed.
    """
    given = parse_body(body, MessagesRequest, decode_messages)
    request, origins = _chat(given)
    request.max_tokens = given.max_tokens
    request.stream = given.stream
    request.temperature, request.top_p = given.temperature, given.top_p
    request.stop = given.stop_sequences
    given.extend(request)
    return ParsedBody(request, fields=_fields(given, request, origins))


def parse_count(body: bytes) -> ParsedBody:
    """Decode a body of `/v1/messages/count_tokens`.

    Raises:
        RequestError: it is malformed.
    """
    given = parse_body(body, CountRequest, decode_count)
    request, origins = _chat(given)
    return ParsedBody(request, fields=_fields(given, request, origins))


def _fields(given: CountRequest, request: ChatRequest, origins: Sequence[FieldOrigin]) -> ClientFields:
    names = names_of(request) | _NAMES
    if "response_format" not in names:
        form = "output_format" if given.output_format is not None else "output_config.format"
        names |= {"response_format.json_schema": form, "response_format": form}
    return ClientFields(names=names, messages=tuple(origins), tools="input_schema")


def _chat(given: CountRequest) -> tuple[ChatRequest, list[FieldOrigin]]:
    """Give the request, and the origin of each of its messages."""
    if not given.messages:
        raise RequestError("must hold at least one message, got none", field="messages")
    messages = [Message(role="system", content=_system(given.system))] if given.system else []
    origins = [FieldOrigin(field="system", content="system")] * len(messages)
    for index, message in enumerate(given.messages):
        where = f"messages[{index}]"
        made = _messages(message, where)
        messages += made
        origins += [FieldOrigin(field=where, content=f"{where}.content")] * len(made)
    request = ChatRequest(model=given.model, messages=messages)
    if messages and messages[-1].role == "assistant" and messages[-1].content and not messages[-1].tool_calls:
        request.continue_final_message = True
    if given.tools is not None:
        request.tools = [_tool(tool) for tool in given.tools]
    _choose(request, given.tool_choice)
    config = given.output_config
    if config is not None:
        request.reasoning_effort = config.effort
    if given.thinking is not None:
        if given.thinking.type == "disabled":
            request.reasoning_effort = "none"
        else:
            request.chat_template_kwargs = {"enable_thinking": True, "thinking": True}
    form = given.output_format or (config.format if config is not None else None)
    if form is not None:
        request.response_format = _format(
            form, "output_config.format" if given.output_format is None else "output_format"
        )
    return request, origins


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    """Give a tool in the form of chats. A tool of another type without a schema keeps its type alone, and the model is not told of it."""
    if tool.type not in {None, "custom"} and tool.input_schema is None:
        return {"type": tool.type}
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _choose(request: ChatRequest, choice: AnthropicToolChoice | None) -> None:
    if choice is None:
        return
    if choice.disable_parallel_tool_use:
        request.parallel_tool_calls = False
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("required, but missing", field="tool_choice.name")
        request.tool_choice = {"type": "function", "function": {"name": choice.name}}
    elif choice.type in _CHOICES:
        request.tool_choice = _CHOICES[choice.type]
    else:
        raise RequestError(
            f"must be one of auto, any, tool, none, got {choice.type[:40]!r}",
            field="tool_choice.type",
        )


def _format(form: MessagesOutputFormat, where: str) -> dict[str, Any]:
    if form.type != "json_schema" or form.schema is None:
        raise RequestError(
            f"must be of type 'json_schema' with a schema, got {form.type[:40]!r}", field=where
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema}}


def _system(system: str | list[ContentBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    for index, block in enumerate(system):
        if block.type != "text":
            where = f"system[{index}].type"
            raise RequestError(f"must be 'text', got {block.type[:40]!r}", field=where)
    return "\n".join(block.text for block in system)


def _messages(message: AnthropicMessage, where: str) -> list[Message]:
    """Give the messages that one of the body stands for: tool results are messages of their own."""
    if message.role not in _ROLES:
        raise RequestError(
            f"must be one of {', '.join(_ROLES)}, got {message.role[:40]!r}",
            field=f"{where}.role",
        )
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    made: list[Message] = []
    said = Message(role=message.role)
    parts: list[ContentPart] = []
    for index, block in enumerate(message.content):
        place = f"{where}.content[{index}]"
        if block.type == "tool_result":
            made.append(Message(role="tool", tool_call_id=block.tool_use_id, content=_result(block, place)))
        elif block.type == "tool_use":
            call = {"name": block.name, "arguments": msgspec.json.encode(block.input or {}).decode()}
            said.tool_calls = said.tool_calls or []
            said.tool_calls.append({"id": block.id, "type": "function", "function": call})
        elif block.type == "thinking":
            said.reasoning_content = (said.reasoning_content or "") + block.thinking
        elif block.type in _OF_OTHERS or block.type.endswith("_tool_result"):
            name_once(f"blocks of type {block.type[:40]}")
        else:
            parts += _parts(block, place)
    if parts or said.tool_calls or said.reasoning_content or not made:
        said.content = _joined(parts)
        made.append(said)
    return made


def _joined(parts: Sequence[ContentPart]) -> str | list[ContentPart]:
    """Give texts as one, and parts where there are images among them."""
    if all(part.type == "text" for part in parts):
        return "\n".join(part.text or "" for part in parts)
    return list(parts)


def _result(block: ContentBlock, where: str) -> str | list[ContentPart]:
    """Give what a tool said; templates have no place for `is_error`, so the text says it."""
    said = block.content or []
    if isinstance(said, str):
        return _ERROR + said if block.is_error else said
    parts = [part for index, inner in enumerate(said) for part in _parts(inner, f"{where}.content[{index}]")]
    if block.is_error:
        parts.insert(0, ContentPart(type="text", text=_ERROR.strip()))
    return _joined(parts)


def _parts(block: ContentBlock, where: str) -> list[ContentPart]:
    """Give the parts of a block; a document's title, and a search result's title and source, are texts before the others."""
    source = block.source
    named = [ContentPart(type="text", text=block.title)] if block.title else []
    if block.type == "search_result" and isinstance(source, str) and isinstance(block.content, list):
        return [*named, ContentPart(type="text", text=source), *_inner(block.content, f"{where}.content")]
    if block.type == "document" and isinstance(source, MessagesSource):
        text = source.data if source.type == "text" else source.content
        if isinstance(text, str):
            return [*named, ContentPart(type="text", text=text)]
        if text is not None:
            return [*named, *_inner(text, f"{where}.source.content")]
    return [_part(block, where)]


def _inner(blocks: Sequence[ContentBlock], where: str) -> list[ContentPart]:
    return [_part(block, f"{where}[{index}]") for index, block in enumerate(blocks)]


def _part(block: ContentBlock, where: str) -> ContentPart:
    source = block.source
    if block.type == "text":
        return ContentPart(type="text", text=block.text)
    if block.type == "tool_reference":
        return ContentPart(type="text", text=block.tool_name)
    if block.type == "compaction" and isinstance(block.content, str):
        return ContentPart(type="text", text=block.content)
    if (
        block.type != "image"
        or not isinstance(source, MessagesSource)
        or source.type not in {"base64", "url"}
    ):
        raise RequestError(
            f"{block.type[:40]!r} is not supported; send text, image (base64 or url), document (text or"
            " content), search_result, tool_use, tool_result or thinking",
            field=f"{where}.type",
        )
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return ContentPart(type="image_url", image_url=MediaUrl(url=url))
