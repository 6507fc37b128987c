"""The client's HTTP parser gives the same result however the network cuts the bytes."""

import asyncio
import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.client import MeasuredRequest, _Connection

TEXTS = st.lists(st.text(min_size=1, max_size=5), max_size=8)


class _Wire(asyncio.Transport):
    """Takes what is written and remembers whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


def _body(texts: list[str]) -> bytes:
    events = [msgspec.json.encode({"choices": [{"text": text}]}) for text in texts]
    usage = msgspec.json.encode({"usage": {"prompt_tokens": 1, "completion_tokens": len(texts)}})
    return b"".join(b"data: " + event + b"\n\n" for event in [*events, usage]) + b"data: [DONE]\n\n"


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


def _run(answer: bytes, pieces: list[int], *, closed: bool) -> tuple[MeasuredRequest, _Connection, bool]:
    async def main():
        loop = asyncio.get_running_loop()
        connection, exchange = _Connection(loop, quickack=False), MeasuredRequest(due_s=0.0)
        connection.connection_made(_Wire())
        running = loop.create_task(connection.run(b"", exchange))
        await asyncio.sleep(0)
        for piece in _cut(answer, pieces):
            if not running.done() and connection._exchange is not None:
                connection.data_received(piece)
        if closed:
            connection.connection_lost(None)
        answered = await running
        exchange.finish(1.0)
        return exchange, connection, answered

    return asyncio.run(main())


@given(TEXTS, st.lists(st.integers(0, 10_000)), st.lists(st.integers(0, 10_000)), st.booleans())
def test_a_chunked_stream_in_any_pieces(texts, chunks, pieces, upper):
    body = b"".join(
        (b"%X;note=1" if upper else b"%x") % len(chunk) + b"\r\n" + chunk + b"\r\n"
        for chunk in _cut(_body(texts), chunks)
    )
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"
    exchange, connection, answered = _run(answer, pieces, closed=False)
    assert answered
    assert connection.reusable
    assert exchange.failure == (None if texts else "empty")
    assert exchange.output_tokens == len(texts)
    assert len(exchange.gaps_s) == max(len(texts) - 1, 0)


@given(TEXTS.filter(bool), st.lists(st.integers(0, 10_000)), st.booleans())
def test_a_measured_or_open_ended_body_in_any_pieces(texts, pieces, measured):
    body = _body(texts)
    length = b"Content-Length: %d\r\n" % len(body) if measured else b""
    answer = b"HTTP/1.1 200 OK\r\n" + length + b"\r\n" + body
    exchange, connection, answered = _run(answer, pieces, closed=not measured)
    assert answered
    assert connection.reusable == measured
    assert exchange.failure is None
    assert exchange.output_tokens == len(texts)


@given(TEXTS.filter(bool), st.integers(0, 10_000), st.lists(st.integers(0, 10_000)))
def test_a_cut_answer_is_a_failure(texts, end, pieces):
    body = _body(texts)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    answer = answer[: end % len(answer)]
    exchange, connection, answered = _run(answer, pieces, closed=True)
    assert not connection.reusable
    assert answered == (b"\r\n\r\n" in answer)
    assert exchange.failure == "disconnected"


@given(st.binary(max_size=200), st.lists(st.integers(0, 10_000)))
def test_garbage_is_a_failure_and_never_an_exception(garbage, pieces):
    exchange, _, _ = _run(garbage, pieces, closed=True)
    assert exchange.failure is not None
