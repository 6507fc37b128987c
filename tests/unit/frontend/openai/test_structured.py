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
