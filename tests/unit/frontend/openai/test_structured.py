import json
from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.frontend.openai.bodies import ChatRequest
from penstock.frontend.openai.structured import structured_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def structured(**fields: Any) -> Any:
    packed = structured_of(ChatRequest(model="m", messages=[], **fields))
    return None if packed is None else json.loads(packed)


def test_formats_become_constraints() -> None:
    assert structured() is None
    assert structured(response_format={"type": "text"}) is None
    assert structured(response_format={"type": "json_object"}) == {"json_object": True}
    named = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    assert structured(response_format=named) == {"json": SCHEMA}


def test_vllms_own_field_is_passed_on() -> None:
    outputs = {"regex": "[a-z]+", "disable_any_whitespace": True}
    assert structured(structured_outputs=outputs) == outputs
    assert structured(structured_outputs=outputs, response_format={"type": "text"}) == outputs


@pytest.mark.parametrize(
    ("kind", "value"),
    [("json", SCHEMA), ("json", "{}"), ("regex", "a+"), ("choice", ["a"]), ("grammar", "root ::= x")],
)
def test_older_names_are_taken(kind: str, value: Any) -> None:
    assert structured(**{f"guided_{kind}": value}) == {kind: value}
    with pytest.raises(RequestError, match=f"guided_{kind}: contradicts"):
        structured(**{f"guided_{kind}": value}, structured_outputs={"regex": "b"})


def test_a_large_schema_is_refused() -> None:
    large = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * (1 << 20)]}}}
    with pytest.raises(RequestError, match="at most 1048576 are allowed"):
        structured(response_format=large)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format",
            "must be one of text, json_object, json_schema, got 'xml'",
        ),
        ({"response_format": "json"}, "response_format", "got None"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "json_schema.schema: must be an object",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, .*, got none"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "got json, regex"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "contradicts response_format",
        ),
    ],
)
def test_malformed_fields_are_refused(fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        structured(**fields)
    assert refused.value.param == param
