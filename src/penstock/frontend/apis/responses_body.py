"""Bodies of the Responses API, and their translation to the frontend's own requests."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.apis.bodies import (
    AgentHintsBody,
    ChatRequest,
    ContentPart,
    MediaUrl,
    Message,
    PeerBody,
    SamplingExtensions,
    SessionBody,
    take_peer_fields,
)
from penstock.frontend.apis.checks import check_tool, wrong
from penstock.frontend.apis.decoding import name_once, parse_body
from penstock.frontend.apis.dialect import ClientTool, ParsedBody, ResponseFields, names_of
from penstock.frontend.errors import ClientFields, FieldOrigin

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities."""
ENCRYPTED = "reasoning.encrypted_content"
"""Value of `include` that asks for reasoning as one opaque text, which is all that some clients send back of it."""


class InputPart(msgspec.Struct, kw_only=True):
    """A part of an item's content; unknown fields, such as `annotations`, are ignored."""

    type: str
    text: str = ""
    refusal: str = ""
    image_url: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """Any item of the input; unknown fields, such as `status`, are ignored."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str = ""
    namespace: str | None = None
    arguments: Any = None
    input: str = ""
    output: Any = None
    summary: list[InputPart] | None = None  # of reasoning
    encrypted_content: str | None = None  # of reasoning
    action: Any = None  # of local_shell_call, shell_call and computer_call
    operation: Any = None  # of apply_patch_call
    tools: list[dict[str, Any]] | None = None  # of tool_search_output and additional_tools


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None  # accepted, no effect: reasoning is given as it is


class TextFormat(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: Any = None
    strict: Any = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingExtensions, kw_only=True):
    """Body of `/v1/responses`."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    include: Any = None  # `LOGPROBS` and `ENCRYPTED` have an effect, nothing else
    # Accepted, no effect but that the answer repeats them.
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
    # Accepted, no effect on the answer.
    stream_options: Any = None
    service_tier: Any = None
    strict: bool | None = None
    # Penstock's, as in chats.
    chat_template_kwargs: dict[str, Any] | None = None
    session: SessionBody | None = None
    agent_hints: AgentHintsBody | None = None
    nvext: PeerBody | None = None


class DeletedResponse(msgspec.Struct, kw_only=True):
    """Says that a kept answer is deleted."""

    id: str
    object: str = "response"
    deleted: bool = True


decode_responses = msgspec.json.Decoder(ResponsesRequest).decode


INPUT = "input"
"""The one parameter of the function that stands for a custom tool."""
_OF_KEYS = frozenset({"name", "description", "parameters", "strict"})


class ClientTools:
    """The functions of one body.

    Attributes:
        all: tools of a chat.
        of_client: what the client's calls look like, by function; functions without a namespace are left out.
    """

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.of_client: dict[str, ClientTool] = {}
        self._encoded: set[bytes] = set()

    def add(self, tool: dict[str, Any], where: str) -> None:
        """Take a tool of the body, or one that a search of the client's found.

        Raises:
            RequestError: it is malformed.
        """
        kind = tool.get("type")
        if kind == "custom":
            self._add_custom(tool, where)
        elif kind == "namespace":
            self._add_namespace(tool, where)
        elif kind == "tool_search" and tool.get("execution") == "client":
            function = {"description": tool.get("description"), "parameters": tool.get("parameters")}
            self._add_function(
                {"name": kind} | function, where, ClientTool(kind="tool_search_call", name=kind)
            )
        elif kind == "function":
            self._add_function(tool, where)
        else:
            self._take(
                {"type": kind} | {key: tool[key] for key in ("parameters", "function") if key in tool}, where
            )

    def choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Give `tool_choice` as chats have it."""
        if not isinstance(choice, dict) or "function" in choice:
            return choice
        if choice.get("type") != "allowed_tools":
            return self._named(choice)
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [self._named(tool) if isinstance(tool, dict) else tool for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}

    def _named(self, choice: dict[str, Any]) -> dict[str, Any]:
        kind, name = choice.get("type"), choice.get("name")
        if not isinstance(kind, str) or kind not in {"function", "custom"}:
            return {"type": kind}
        if isinstance(name, str) and isinstance(namespace := choice.get("namespace"), str):
            name = function_name(namespace, name)
        return {"type": "function", "function": {"name": name}}

    def _add_custom(self, tool: dict[str, Any], where: str, namespace: str = "") -> None:
        form = tool.get("format")
        told = {"type": "string", "description": "The whole input of the tool, as plain text."}
        if isinstance(form, dict) and form.get("type") == "grammar":
            told["description"] += (
                f" It must match this {form.get('syntax')} grammar:\n{form.get('definition')}"
            )
        parameters = {"type": "object", "properties": {INPUT: told}, "required": [INPUT]}
        name = tool.get("name")
        self._add_function(
            {"name": name, "description": tool.get("description"), "parameters": parameters},
            where,
            ClientTool(kind="custom_tool_call", name=str(name), namespace=namespace),
        )

    def _add_namespace(self, tool: dict[str, Any], where: str) -> None:
        namespace, tools = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not namespace:
            raise wrong(f"{where}.name", namespace, "the name of a namespace")
        if not isinstance(tools, list):
            raise wrong(f"{where}.tools", tools, "a list of tools")
        for index, inner in enumerate(tools):
            place = f"{where}.tools[{index}]"
            kind = inner.get("type") if isinstance(inner, dict) else None
            if kind == "custom":
                self._add_custom(inner, place, namespace)
            elif kind == "function":
                client = ClientTool(kind="function_call", name=str(inner.get("name")), namespace=namespace)
                self._add_function(inner, place, client)
            else:
                raise wrong(f"{place}.type", kind, "'function' or 'custom'")

    def _add_function(self, tool: dict[str, Any], where: str, client: ClientTool | None = None) -> None:
        function = {key: value for key, value in tool.items() if key in _OF_KEYS and value is not None}
        if client is not None:
            if client.namespace and isinstance(tool.get("name"), str):
                function["name"] = function_name(client.namespace, client.name)
            self.of_client[str(function.get("name"))] = client
        self._take({"type": "function", "function": function}, where)

    def _take(self, tool: dict[str, Any], where: str) -> None:
        try:
            check_tool(tool, where)
        except RequestError as error:
            error.rename(lambda field: field.replace(".function", ""))
            raise
        encoded = msgspec.json.encode(tool)
        if encoded not in self._encoded:  # searches find a tool again
            self._encoded.add(encoded)
            self.all.append(tool)


def function_name(namespace: str | None, name: str) -> str:
    """Give the name of the function that stands for a tool of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


_SEAL = "penstock:"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_OF_OTHERS = frozenset(
    {
        "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "mcp_list_tools",
        "mcp_approval_request", "mcp_approval_response", "compaction", "compaction_summary", "context_compaction",
    }
)  # fmt: skip
"""Items of what another server did, or can alone read: they are left out, and the log names each type once."""
_OF_CLIENTS = ("tool_search", "local_shell", "shell", "apply_patch", "computer")
"""Tools that clients run without a function of their own: `X_call` and `X_call_output` items."""
_SERVED = "message, function_call, custom_tool_call, their outputs, reasoning"


@dataclass(slots=True)
class _Turn:
    """A message, and the results of its calls."""

    message: Message
    origin: FieldOrigin
    results: list[tuple[Message, FieldOrigin]] = field(default_factory=list)


class InputConversation:
    """Makes the messages of an input.

    Calls join the message of the assistant before them, unless reasoning stands between. The results of calls follow the
    message that has the calls, wherever their items stand before the next message of another role: templates ask for that.

    Attributes:
        loaded: tools that items declare, each with its field.
    """

    def __init__(self, given: str | list[InputItem]) -> None:
        """Read an input.

        Raises:
            RequestError: an item is malformed, or of an unknown type.
        """
        self.loaded: list[tuple[dict[str, Any], str]] = []
        self._turns: list[_Turn] = []
        self._of_call: dict[str, _Turn] = {}
        self._reasoning = ""
        if isinstance(given, str):
            self._say(Message(role="user", content=given), FieldOrigin(field="input", content="input"))
            return
        for index, item in enumerate(given):
            self._add(item, f"input[{index}]")
        self._forget_reasoning()

    def messages(self) -> Iterator[tuple[Message, FieldOrigin]]:
        """Give the messages, and where each stands in the body."""
        for turn in self._turns:
            yield turn.message, turn.origin
            yield from turn.results

    def _add(self, item: InputItem, where: str) -> None:
        origin = FieldOrigin(field=where, content=f"{where}.content", has_parts=True)
        if item.type == "message":
            if item.role is None:
                raise RequestError("required, but missing", field=f"{where}.role")
            self._say(Message(role=item.role, content=_content(item.content, origin.content)), origin)
        elif item.type == "reasoning":
            self._reasoning += _thought(item)
        elif (call := _call_of(item)) is not None:
            self._call(*call, origin)
            if item.type == "mcp_call":
                self._result(item.id, str(item.output or ""), where)
        elif item.type in {"additional_tools", "tool_search_output"}:
            self.loaded += [(tool, f"{where}.tools[{index}]") for index, tool in enumerate(item.tools or ())]
            if item.type == "tool_search_output":
                self._result(item.call_id, _json(item.tools or []), where)
        elif (output := _output_of(item, f"{where}.output")) is not None:
            self._result(item.call_id or item.id, output, where)
        elif item.type in _OF_OTHERS:
            name_once(f"input items of type {item.type}")
        else:
            raise RequestError(
                f"must be one of {_SERVED}, or of a tool that clients run, got {item.type[:40]!r}",
                field=f"{where}.type",
            )

    def _say(self, message: Message, origin: FieldOrigin) -> None:
        if message.role == "assistant":
            message.reasoning_content, self._reasoning = self._reasoning or None, ""
        else:
            self._forget_reasoning()
            self._of_call.clear()
        self._turns.append(_Turn(message, origin))

    def _call(self, call_id: str | None, name: str, arguments: str, origin: FieldOrigin) -> None:
        last = self._turns[-1] if self._turns else None
        if last is None or last.message.role != "assistant" or last.results or self._reasoning:
            self._say(Message(role="assistant", content=""), origin)
            last = self._turns[-1]
        calls = last.message.tool_calls = last.message.tool_calls or []
        calls.append(
            {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}
        )
        self._of_call[call_id or ""] = last

    def _result(self, call_id: str | None, output: str | list[ContentPart], where: str) -> None:
        message = Message(role="tool", tool_call_id=call_id or "", content=output)
        origin = FieldOrigin(field=where, content=f"{where}.output", has_parts=True)
        turn = self._of_call.get(call_id or "")
        if turn is None:
            self._turns.append(_Turn(message, origin))
        else:
            turn.results.append((message, origin))

    def _forget_reasoning(self) -> None:
        """Drop reasoning that no answer followed, as of a turn that its user ended."""
        if self._reasoning:
            name_once("reasoning items without an answer after them")
        self._reasoning = ""


def sealed(thought: str) -> str:
    """Encode reasoning as an opaque text that `unsealed` reads. It is no secret: the item has the same reasoning in words."""
    return _SEAL + base64.b64encode(thought.encode()).decode()


def unsealed(text: str) -> str:
    """Give the reasoning of an opaque text; empty for one of another server."""
    if not text.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_SEAL)).decode()
    except ValueError:
        return ""


def _thought(item: InputItem) -> str:
    """Give the text of a reasoning item, or else its summary. What another server has encrypted cannot be read."""
    if isinstance(item.content, str):
        return item.content
    thought = "".join(part.text for part in item.content or ()) or unsealed(item.encrypted_content or "")
    thought = thought or "".join(part.text for part in item.summary or ())
    if not thought:
        name_once("reasoning items without text")
    return thought


def _call_of(item: InputItem) -> tuple[str | None, str, str] | None:
    """Give (call id, function, arguments as JSON) of an item that is a call; None of any other."""
    name = function_name(item.namespace, item.name)
    if item.type in {"function_call", "mcp_call"}:
        arguments = "" if item.arguments is None else item.arguments
        return item.call_id or item.id, name, arguments if isinstance(arguments, str) else _json(arguments)
    if item.type == "custom_tool_call":
        return item.call_id, name, _json({INPUT: item.input})
    tool = item.type.removesuffix("_call")
    if tool == item.type or tool not in _OF_CLIENTS:
        return None
    said = item.arguments or item.action or item.operation or {}
    return item.call_id or item.id, tool, _json(said)


def _output_of(item: InputItem, where: str) -> str | list[ContentPart] | None:
    """Give the content of an item that is the output of a call: parts, or anything else as JSON; None of any other."""
    if item.type in {"function_call_output", "custom_tool_call_output"}:
        try:
            return _content(msgspec.convert(item.output, str | list[InputPart] | None), where)
        except msgspec.ValidationError as error:
            raise RequestError("must be a text, or a list of parts that have a type", field=where) from error
    tool = item.type.removesuffix("_call_output")
    if tool == item.type or tool not in _OF_CLIENTS:
        return None
    if item.output is None:
        return ""
    return item.output if isinstance(item.output, str) else _json(item.output)


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
        f"{part.type[:40]!r} is not supported; send input_text, output_text, refusal, or input_image with an"
        " image_url",
        field=f"{where}.type",
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


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
        raise RequestError(f"must be 'auto' or 'disabled', got {given.truncation[:40]!r}", field="truncation")
    messages = [] if given.instructions is None else [Message(role="system", content=given.instructions)]
    instructions = len(messages)
    origins = [FieldOrigin(field="instructions", content="instructions")] * instructions
    said = InputConversation(given.input)
    for message, origin in said.messages():
        messages.append(message)
        origins.append(origin)
    tools = ClientTools()
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


def _format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema":
        named = {"name": form.name or "answer", "description": form.description, "schema": form.schema}
        return {"type": "json_schema", "json_schema": named | {"strict": form.strict}}
    return {"type": form.type} | ({} if form.schema is None else {"schema": form.schema})
