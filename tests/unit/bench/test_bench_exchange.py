import json

import pytest

from penstock.bench.exchange import Exchange, Failure


def _event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _chat(text: str | None, **more: object) -> bytes:
    return _event({"choices": [{"index": 0, "delta": {"content": text}}], **more})


DONE = b"data: [DONE]\n\n"


def test_times_count_from_when_it_was_due():
    exchange = Exchange(due_s=10.0, sent_s=10.5)
    exchange.feed(_chat(""), 11.0)  # the role, without text
    exchange.feed(_chat("a"), 12.0)
    exchange.feed(_chat("b") + _chat("c"), 13.0)
    exchange.feed(_event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}) + DONE, 14.0)
    exchange.finish(15.0)
    assert exchange.failure is None
    assert exchange.ttft_s == 2.0
    assert exchange.gaps_s == [1.0, 0.0]
    assert exchange.e2e_s == 5.0
    assert exchange.output_tokens == 7
    assert exchange.time_per_token_s == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    "event",
    [
        _event({"choices": [{"text": "a"}]}),
        _event({"choices": [{"delta": {"reasoning_content": "a"}}]}),
        b': keep-alive\r\n\r\nevent: x\r\ndata:{"choices":[{"text":"a"}]}\r\n\r\n',
    ],
)
def test_text_is_found_wherever_a_server_puts_it(event):
    exchange = Exchange(due_s=0.0)
    exchange.feed(event + DONE, 1.0)
    exchange.finish(2.0)
    assert exchange.failure is None
    assert exchange.output_tokens == 1
    assert exchange.time_per_token_s is None


@pytest.mark.parametrize(
    ("body", "failure", "message"),
    [
        (_chat("a"), Failure.DISCONNECTED, "before its last event"),
        (DONE, Failure.EMPTY, "no token"),
        (b"data: {oops\n\n" + DONE, Failure.MALFORMED, "oops"),
        (_chat("a") + _event({"error": {"message": "worker\nlost"}}), Failure.STREAM_ERROR, "worker lost"),
        (_event({"error": "busy"}) + DONE, Failure.STREAM_ERROR, "busy"),
        (b"x" * (1 << 21), Failure.MALFORMED, "an event of more than"),
    ],
)
def test_the_first_reason_of_a_failure_is_kept(body, failure, message):
    exchange = Exchange(due_s=0.0)
    exchange.feed(body, 1.0)
    exchange.finish(2.0)
    assert exchange.failure == failure
    assert message in exchange.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"no such model"}}', "no such model"),
        (b"<h1>Bad\nGateway</h1>", "<h1>Bad Gateway</h1>"),
    ],
)
def test_a_refusal_is_named_by_its_status(body, message):
    exchange = Exchange(due_s=0.0)
    exchange.refuse(404, body)
    exchange.finish(1.0)
    assert exchange.failure == "http_404"
    assert exchange.message == message
