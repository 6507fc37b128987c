"""Bodies of the OpenAI API: what is refused, and in which words."""

import json

import pytest

from penstock.core.errors import EngineError, Overloaded, RequestError
from penstock.frontend.errors import UnknownModelError, error_answer
from penstock.frontend.openai.answers import encode
from penstock.frontend.openai.bodies import parse_chat, parse_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def refusal(body: bytes, parse=parse_chat) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert caught.value.http_status == 400
    return caught.value


def chat(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty"),
        (b'{"model": "m"', "the body is not valid JSON"),
        (b"\xef\xbb\xbf{}", "the body is not valid JSON"),
        (b'{"model": NaN}', "the body is not valid JSON"),
        (b'{"model": "\\ud800"}', "the body is not valid JSON"),
        (b'{"model": "\xff"}', "the body is not valid UTF-8"),
        (b"[]", "the body: expected object, got array"),
        (b'{"model":"m","messages":[],"tools":' + b"[" * 100_000, "the body is nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused_without_a_field(body: bytes, says: str) -> None:
    error = refusal(body)
    assert says in error.message
    assert error.param is None


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b'{"model": "m"}', "messages", "messages: required, but missing"),
        (chat(model=1), "model", "model: expected string, got integer"),
        (chat(max_tokens="5"), "max_tokens", "max_tokens: expected integer or null, got string"),
        (chat(max_tokens=1.5), "max_tokens", "max_tokens: must be a whole number, got 1.5"),
        (chat(stream="yes"), "stream", "stream: expected boolean or null, got string"),
        (chat(temperature="hot"), "temperature", "temperature: expected number or null, got string"),
        (chat(stop=[1]), "stop[0]", "stop[0]: expected string, got integer"),
        (chat(messages=[{"content": "hi"}]), "messages[0].role", "messages[0].role: required, but missing"),
        (
            chat(messages=[{"role": "user", "content": 5}]),
            "messages[0].content",
            "expected string or array or null",
        ),
        (chat(max_token=5), "max_token", "max_token: unknown field; did you mean 'max_tokens'?"),
        (chat(zzz=5), "zzz", "zzz: unknown field"),
        (chat(stream_options={"usage": True}), "stream_options.usage", "stream_options.usage: unknown field"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(body: bytes, param: str, says: str) -> None:
    error = refusal(body)
    assert says in error.message
    assert error.param == param


def test_numbers_out_of_range_are_refused() -> None:
    assert (
        "temperature: number out of range"
        in refusal(chat().replace(b'"m"', b'"m","temperature":1e999')).message
    )


def test_fields_that_change_nothing_are_accepted() -> None:
    request = parse_chat(
        chat(user="u", metadata={"a": "b"}, store=True, service_tier="auto", parallel_tool_calls=True)
    )
    assert request.model == "m"


def test_an_answer_can_be_sent_back_as_a_message() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None}
    assert parse_chat(chat(messages=[*MESSAGES, answer])).messages[1].content == "x"


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_every_form_of_prompt_is_read(prompt: object) -> None:
    assert parse_completion(json.dumps({"model": "m", "prompt": prompt}).encode()).prompt == prompt


def test_a_prompt_of_another_type_is_refused() -> None:
    error = refusal(b'{"model": "m", "prompt": [true]}', parse_completion)
    assert error.message.startswith("prompt[")


def test_errors_have_the_apis_shape() -> None:
    def shape(error: Exception) -> dict:
        return json.loads(encode(error_answer(error)))["error"]

    assert shape(RequestError("n: bad", param="n")) == {
        "message": "n: bad", "type": "invalid_request_error", "param": "n", "code": None,
    }  # fmt: skip
    assert shape(UnknownModelError("no", param="model"))["code"] == "model_not_found"
    assert shape(Overloaded("full"))["type"] == "server_error"
    assert shape(EngineError("broke"))["code"] == "engine_error"
