"""Wrong bodies in words. Those of OpenAI's requests are in test_openai_bodies."""

from enum import StrEnum

import msgspec
import pytest

from penstock.frontend.openai.body_error import body_error


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Paint(msgspec.Struct, forbid_unknown_fields=True):
    colour: Colour
    coats: int = 1


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b'{"colour": "green"}', "colour", "colour: must be one of 'red', 'blue', got 'green'"),
        (b'{"colour": 5}', "colour", "colour: expected string, got integer 5"),
        (b'{"colour": "red", "coats": "x"}', "coats", "coats: expected integer, got string 'x'"),
        (b'{"colour": "red", "coats": 1.5}', "coats", "coats: must be a whole number, got 1.5"),
        (b'{"colour": []}', "colour", "colour: expected string, got array"),
        (
            b'{"colour": "red", "coat": 1}',
            "coat",
            "coat: unknown field; did you mean 'coats'?",
        ),
        (b"{}", "colour", "colour: required, but missing"),
        (b"[]", None, "the body: expected object, got array"),
        (b"", None, "the body is empty; expected a JSON object"),
    ],
)
def test_the_field_is_named_with_what_it_may_be(body, param, says):
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(body, type=Paint)
    error = body_error(caught.value, body, Paint)
    assert (error.message, error.param) == (says, param)
