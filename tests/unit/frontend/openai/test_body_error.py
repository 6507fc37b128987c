"""Wrong bodies in words. Those of OpenAI's requests are in test_openai_bodies."""

from enum import StrEnum

import msgspec
import pytest

from penstock.core.errors import RequestError
from penstock.frontend.openai.bodies import parse_chat
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


def test_as_many_levels_as_the_error_allows_are_taken() -> None:
    deep = '{"model": "m", "messages": [{"role": "user", "content": "a"}], "metadata": %s}'
    assert parse_chat((deep % ("[" * 499 + "]" * 499)).encode()).model == "m"
    with pytest.raises(RequestError, match="nested too deeply; expected at most 500 levels"):
        parse_chat((deep % ("[" * 2000 + "]" * 2000)).encode())


def test_a_wrong_type_beside_what_is_nested_as_deeply_as_can_be_decoded_is_explained() -> None:
    """The value is not shown where finding it would need more calls than decoding did."""
    for depth in range(700, 1000):
        body = b'{"model": "m", "messages": 7, "deep": ' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(RequestError):
            parse_chat(body)
