"""Items of a Responses input as messages of a chat."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.client_fields import Origin
from penstock.frontend.openai.bodies import Message
from penstock.frontend.openai.lenient import name_once
from penstock.frontend.openai.media import ContentPart, MediaUrl
from penstock.frontend.responses.bodies import InputItem, InputPart
from penstock.frontend.responses.tools import INPUT, function_name

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
    origin: Origin
    results: list[tuple[Message, Origin]] = field(default_factory=list)


class Conversation:
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
            self._say(Message(role="user", content=given), Origin(field="input", content="input"))
            return
        for index, item in enumerate(given):
            self._add(item, f"input[{index}]")
        self._forget_reasoning()

    def messages(self) -> Iterator[tuple[Message, Origin]]:
        """Give the messages, and where each stands in the body."""
        for turn in self._turns:
            yield turn.message, turn.origin
            yield from turn.results

    def _add(self, item: InputItem, where: str) -> None:
        origin = Origin(field=where, content=f"{where}.content", has_parts=True)
        if item.type == "message":
            if item.role is None:
                raise RequestError(f"{where}.role: required, but missing", param=f"{where}.role")
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
                f"{where}.type: must be one of {_SERVED}, or of a tool that clients run, got {item.type[:40]!r}",
                param=f"{where}.type",
            )

    def _say(self, message: Message, origin: Origin) -> None:
        if message.role == "assistant":
            message.reasoning_content, self._reasoning = self._reasoning or None, ""
        else:
            self._forget_reasoning()
            self._of_call.clear()
        self._turns.append(_Turn(message, origin))

    def _call(self, call_id: str | None, name: str, arguments: str, origin: Origin) -> None:
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
        origin = Origin(field=where, content=f"{where}.output", has_parts=True)
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
    """Give reasoning as an opaque text, which `unsealed` reads; nothing is secret in it, as its item has the same in words."""
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
            raise RequestError(
                f"{where}: must be a text, or a list of parts that have a type", param=where
            ) from error
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
        f"{where}.type: {part.type[:40]!r} is not supported; send input_text, output_text, refusal, or input_image with an"
        " image_url",
        param=f"{where}.type",
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
