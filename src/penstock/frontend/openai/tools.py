"""Tools of a chat: which are offered, and what an engine is made to write if calls are required."""

from typing import Any

from penstock.core.errors import RequestError
from penstock.frontend.openai.bodies import ChatRequest
from penstock.frontend.openai.lenient import name_once

TOOLS_MAX = 512
NAME_CHARACTERS_MAX = 256
_CHOICES = ("none", "auto", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_OF_NO_PARAMETERS = frozenset({"type", "properties", "required", "$schema", "title", "description"})
"""Keys that a schema of no parameters may have."""
_EXPECT_CALLS = frozenset({"function", "parameters", "custom"})
"""Keys of tools that the client runs."""
_DEFINED = "#/$defs/"
DATA_KEYS = frozenset({"const", "enum", "default", "examples"})
"""Keys of a schema whose values are no schemas."""
NAMING_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keys whose values are schemas by names of any kind."""


def check_tools(request: ChatRequest) -> None:
    """Raises: RequestError: a tool or `tool_choice` is malformed, or names no tool."""
    tools = request.tools or []
    if len(tools) > TOOLS_MAX:
        raise RequestError(f"tools: at most {TOOLS_MAX} are allowed, got {len(tools)}", param="tools")
    for index, tool in enumerate(tools):
        check_tool(tool, f"tools[{index}]")
    choice = request.tool_choice
    if choice is None or choice == "none":
        return
    if isinstance(choice, str) and choice not in _CHOICES:
        raise RequestError(
            f"tool_choice: must be one of {', '.join(_CHOICES)}, or name a tool, got {choice[:40]!r}",
            param="tool_choice",
        )
    functions = [tool["function"]["name"] for tool in tools if _is_function(tool)]
    if (name := named_tool(request)) is not None and name not in functions:
        raise _unknown(name, functions, "tool_choice.function.name")
    for number, name in enumerate(allowed_names(request) or ()):
        if name not in functions:
            raise _unknown(name, functions, f"tool_choice.allowed_tools.tools[{number}].function.name")
    if demands_calls(request) and not offered_tools(request):
        raise RequestError(
            "tool_choice: 'required' needs tools of type 'function'; add some", param="tool_choice"
        )


def _unknown(name: str, functions: list[str], where: str) -> RequestError:
    return RequestError(
        f"{where}: must be one of {', '.join(map(repr, functions[:16])) or 'tools, of which there are none'},"
        f" got {name[:40]!r}",
        param="tool_choice",
    )


def offered_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """Give the tools that the model is told of: functions, and where `tool_choice` allows some of them these alone."""
    if request.tool_choice == "none":
        return []
    allowed = allowed_names(request)
    return [
        tool
        for tool in request.tools or ()
        if _is_function(tool) and (allowed is None or tool["function"]["name"] in allowed)
    ]


def demands_calls(request: ChatRequest) -> bool:
    """Tell whether the answer must have calls, of any offered tool."""
    return request.tool_choice == "required" or _mode(request) == "required"


def allowed_names(request: ChatRequest) -> list[str] | None:
    """Give the functions that `tool_choice` allows; None where it allows all.

    Raises:
        RequestError: `allowed_tools` is malformed.
    """
    if _mode(request) is None:
        return None
    assert isinstance(request.tool_choice, dict)
    names = []
    for number, tool in enumerate(request.tool_choice["allowed_tools"].get("tools") or ()):
        if isinstance(tool, dict) and tool.get("type") != "function":
            continue  # of a type that the server would run
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            where = f"tool_choice.allowed_tools.tools[{number}].function.name"
            raise RequestError(f"{where}: must be a tool's name", param="tool_choice")
        names.append(function["name"])
    return names


def _mode(request: ChatRequest) -> str | None:
    """Give the mode of `allowed_tools`; None where `tool_choice` is another."""
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        allowed = {}
    mode = allowed.get("mode")
    is_mode = isinstance(mode, str) and mode in {"auto", "required"}
    if not is_mode or not isinstance(allowed.get("tools"), list):
        raise RequestError(
            "tool_choice.allowed_tools: must be an object with mode 'auto' or 'required', and a list of tools",
            param="tool_choice",
        )
    return str(mode)


def _is_function(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "function"


def tool_schemas(request: ChatRequest) -> dict[str, Any] | None:
    """Give the JSON schema of each offered tool's arguments by its name; None without tools."""
    tools = offered_tools(request)
    return {tool["function"]["name"]: _schema(tool) for tool in tools} if tools else None


def named_tool(request: ChatRequest) -> str | None:
    """Give the tool that `tool_choice` names; None if it names none.

    Raises:
        RequestError: it is an object of another form.
    """
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") == "allowed_tools":
        return None
    kind, function = choice.get("type"), choice.get("function")
    if kind != "function":
        raise RequestError(
            f"tool_choice.type: must be 'function' or 'allowed_tools', as this server runs no tools itself, got {str(kind)[:40]!r}",
            param="tool_choice",
        )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            'tool_choice: must be {"type": "function", "function": {"name": NAME}} where it names a tool',
            param="tool_choice",
        )
    return name


def required_calls(request: ChatRequest) -> dict[str, Any] | None:
    """Give the constraint of required tool calls, as `structured_outputs` has it; None if the model may write text instead."""
    schemas = tool_schemas(request)
    if schemas is None:
        return None
    if (name := named_tool(request)) is not None:
        return {"json": schemas[name]}
    if not demands_calls(request):
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
    return {"json": calls}


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
        elif key in NAMING_KEYS and isinstance(value, dict):
            moved[key] = {name: _moved(each, number) for name, each in value.items()}
        else:
            moved[key] = value if key in DATA_KEYS else _moved(value, number)
    return moved


def check_tool(tool: dict[str, Any], where: str) -> None:
    """Check a tool. One of a type that a server would run is not offered, and named once in the log.

    Raises:
        RequestError: it is malformed, or expects calls and is no function.
    """
    kind, function = tool.get("type"), tool.get("function")
    if not _is_function(tool):
        if not isinstance(kind, str) or _EXPECT_CALLS & tool.keys():
            expected = "'function', as this server runs no tools itself (/v1/responses takes 'custom' too)"
            raise wrong(f"{where}.type", kind, expected)
        name_once(f"tools of type {kind[:40]}")
        return
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", function, "an object with the function's name and parameters")
    name, parameters = function.get("name"), function.get("parameters") or {}
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise wrong(f"{where}.function.name", name, f"a string of 1 to {NAME_CHARACTERS_MAX} characters")
    if not isinstance(parameters, dict):
        expected = "an object, the JSON schema of the arguments"
        raise wrong(f"{where}.function.parameters", parameters, expected)


def wrong(param: str, value: Any, expected: str) -> RequestError:
    """Make the error for a field that is missing, or has a wrong value."""
    if value is None:
        return RequestError(f"{param}: required, but missing; it must be {expected}", param=param)
    return RequestError(f"{param}: must be {expected}, got {repr(value)[:40]}", param=param)


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Give the schema of a tool's arguments; a tool that names no parameters takes none, as OpenAI documents it."""
    schema: dict[str, Any] = tool["function"].get("parameters") or {"properties": {}}
    names_none = schema.get("properties") == {} and schema.keys() <= _OF_NO_PARAMETERS
    return _NO_PARAMETERS if names_none else schema
