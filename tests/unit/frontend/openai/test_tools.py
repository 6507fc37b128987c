"""Tools of a request: checks, and what an engine is made to write."""

from typing import Any

import msgspec
import pytest

from penstock.core.errors import RequestError
from penstock.frontend.client_fields import ClientFields
from penstock.frontend.openai.bodies import ChatRequest, Message
from penstock.frontend.openai.dialect import names_of
from penstock.frontend.openai.structured import structured_of
from penstock.frontend.openai.tools import check_tools, offered_tools

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "$defs": {"name": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NOW = {"type": "function", "function": {"name": "now"}}


def request(**fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[Message(role="user", content="hi")], **{"tools": TOOLS, **fields})


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    for choice, shown in (("none", []), ("auto", TOOLS), (None, TOOLS), (NOW, TOOLS)):
        check_tools(request(tool_choice=choice))
        assert offered_tools(request(tool_choice=choice)) == shown


def test_required_calls_constrain_the_engine() -> None:
    assert structured_of(request()) is None
    assert structured_of(request(tool_choice="none")) is None
    named = structured_of(request(tool_choice=NOW))
    assert named is not None
    assert msgspec.json.decode(named) == {"json": {"type": "object"}}
    required = structured_of(request(tool_choice="required", parallel_tool_calls=False))
    assert required is not None
    schema = msgspec.json.decode(required)["json"]
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert schema["$defs"]["0"]["$defs"] == CITY["$defs"]
    assert [option["properties"]["name"] for option in schema["items"]["anyOf"]] == [
        {"const": "weather"},
        {"const": "now"},
    ]
    assert (
        "maxItems" not in msgspec.json.decode(structured_of(request(tool_choice="required")) or b"")["json"]
    )


def test_definitions_of_one_name_stay_those_of_their_tool() -> None:
    def tool(name: str, **schema: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object"} | schema}}

    tools = [
        tool("a", **{"$defs": {"v": {"type": "string"}}}, properties={"v": {"$ref": "#/$defs/v"}}),
        tool("b", definitions={"v": {}}, properties={"v": {"$ref": "#/definitions/v"}, "default": {"$ref": "#"}}),
        tool("c", properties={"v": {"const": {"$ref": "#"}}, "w": {"$ref": "https://x"}}, **{"$defs": 5}),
    ]  # fmt: skip
    required = structured_of(request(tools=tools, tool_choice="required"))
    assert required is not None
    schema = msgspec.json.decode(required)["json"]
    assert [option["properties"]["parameters"] for option in schema["items"]["anyOf"]] == [
        {"$ref": f"#/$defs/{number}"} for number in range(3)
    ]
    defined = [schema["$defs"][str(number)]["properties"] for number in range(3)]
    assert defined == [
        {"v": {"$ref": "#/$defs/0/$defs/v"}},
        {"v": {"$ref": "#/$defs/1/definitions/v"}, "default": {"$ref": "#/$defs/1"}},
        {"v": {"const": {"$ref": "#"}}, "w": {"$ref": "https://x"}},
    ]


def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(2000):
        schema = {"not": schema}
    deep = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    required = request(tools=deep, tool_choice="required")
    with pytest.raises(RequestError) as caught, ClientFields(names=names_of(required)):
        structured_of(required)
    assert (caught.value.param, caught.value.message[:38]) == (
        "tools",
        "tools: the schema is nested too deeply",
    )
