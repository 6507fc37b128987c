"""Tools of a chat: which are offered, and what an engine is made to write if calls are required."""

from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.openai.bodies import ChatRequest

TOOLS_MAX = 512
NAME_CHARACTERS_MAX = 256
_CHOICES = ("none", "auto", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_OF_NO_PARAMETERS = frozenset({"type", "properties", "required", "$schema", "title", "description"})
"""Keys that a schema of no parameters may have."""
_DEFINED = "#/$defs/"
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keys of a schema whose values are no schemas."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keys whose values are schemas by names of any kind."""


def check_tools(request: ChatRequest) -> None:
    """Raises: RequestError: a tool or `tool_choice` is malformed, or names no tool."""
    tools = request.tools or []
    if len(tools) > TOOLS_MAX:
        raise RequestError(f"tools: at most {TOOLS_MAX} are allowed, got {len(tools)}", param="tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    choice = request.tool_choice
    if choice is None or choice == "none":
        return
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise RequestError(
                f"tool_choice: must be one of {', '.join(_CHOICES)}, or name a tool, got {choice[:40]!r}",
                param="tool_choice",
            )
        if choice == "required" and not tools:
            raise RequestError("tool_choice: 'required' needs tools; add some", param="tool_choice")
        return
    name = named_tool(request)
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise RequestError(
            f"tool_choice.function.name: must be one of {', '.join(map(repr, names[:16])) or 'tools, of which there are none'},"
            f" got {str(name)[:40]!r}",
            param="tool_choice",
        )


def offered_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """Give the tools that the model is told of."""
    return [] if request.tool_choice == "none" else request.tools or []


def tool_schemas(request: ChatRequest) -> dict[str, Any] | None:
    """Give the JSON schema of each offered tool's arguments by its name; None without tools."""
    tools = offered_tools(request)
    return {tool["function"]["name"]: _schema(tool) for tool in tools} if tools else None


def named_tool(request: ChatRequest) -> str | None:
    """Give the tool that `tool_choice` names; None if it names none."""
    if not isinstance(request.tool_choice, dict):
        return None
    function = request.tool_choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if request.tool_choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            'tool_choice: must be {"type": "function", "function": {"name": NAME}} where it is an object',
            param="tool_choice",
        )
    return name


def required_calls(request: ChatRequest) -> bytes | None:
    """Give `SamplingParams.structured` for required tool calls; None if the model may write text instead."""
    schemas = tool_schemas(request)
    if schemas is None:
        return None
    if (name := named_tool(request)) is not None:
        return msgspec.json.encode({"json": schemas[name]})
    if request.tool_choice != "required":
        return None
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"{_DEFINED}{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, name in enumerate(schemas)
    ]
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": options}}
    if request.parallel_tool_calls is False:
        calls["maxItems"] = 1
    calls["$defs"] = {str(number): _moved(schema, number) for number, schema in enumerate(schemas.values())}
    return msgspec.json.encode({"json": calls})


def _moved(schema: Any, number: int) -> Any:
    """Give a schema whose references to itself are right where it is a definition of another one."""
    if isinstance(schema, list):
        return [_moved(each, number) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and (value == "#" or str(value).startswith("#/")):
            moved[key] = f"{_DEFINED}{number}{value[1:]}"
        elif key in _BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(each, number) for name, each in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, number)
    return moved


def _check_tool(tool: dict[str, Any], where: str) -> None:
    if tool.get("type") != "function":
        raise _wrong(f"{where}.type", tool.get("type"), "'function', as this server runs no tools itself")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{where}.function", function, "an object with the function's name and parameters")
    name, parameters = function.get("name"), function.get("parameters") or {}
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise _wrong(f"{where}.function.name", name, f"a string of 1 to {NAME_CHARACTERS_MAX} characters")
    if not isinstance(parameters, dict):
        expected = "an object, the JSON schema of the arguments"
        raise _wrong(f"{where}.function.parameters", parameters, expected)


def _wrong(param: str, value: Any, expected: str) -> RequestError:
    if value is None:
        return RequestError(f"{param}: required, but missing; it must be {expected}", param=param)
    return RequestError(f"{param}: must be {expected}, got {repr(value)[:40]}", param=param)


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Give the schema of a tool's arguments; a tool that names no parameters takes none, as OpenAI documents it."""
    schema: dict[str, Any] = tool["function"].get("parameters") or {"properties": {}}
    names_none = schema.get("properties") == {} and schema.keys() <= _OF_NO_PARAMETERS
    return _NO_PARAMETERS if names_none else schema
