"""Heads made of constant lines say what aiohttp's say, and a stream waits for a client that takes a little now and then."""

import asyncio
import http.client
import io
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.test_utils import make_mocked_request

from penstock.core.errors import DeadlineExceeded, PenstockError
from penstock.frontend.config import FrontendConfig
from penstock.frontend.http.generation import SseResponse
from penstock.frontend.http.replies import AnswerHeads, json_response, request_id
from penstock.frontend.text.answer import TextEvent

BODY = '{"text":"é"}'.encode()


class Transport(asyncio.Transport):
    """Takes everything; its client has so much left to read, and reads a byte a second for some seconds."""

    def __init__(self, *, closing: bool = False, unread: int = 0, seconds: float = 0.0) -> None:
        super().__init__()
        self.sent = b""
        self._closing, self._unread, self._seconds = closing, unread, seconds

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self._unread - int(min(asyncio.get_running_loop().time(), self._seconds))

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return Mock(fileno=Mock(side_effect=OSError))  # nothing of it is in the kernel

    @property
    def fields(self) -> tuple[bytes, dict[str, str], bytes]:
        """What was sent: status, headers and body."""
        head, _, body = self.sent.partition(b"\r\n\r\n")
        status, _, lines = head.partition(b"\r\n")
        return status, dict(http.client.parse_headers(io.BytesIO(lines + b"\r\n\r\n"))), body


def asked(
    transport: Transport, headers: dict[str, str] | None = None, version: Any = HttpVersion11
) -> web.Request:
    drained = asyncio.Event()
    if not transport.get_write_buffer_size():
        drained.set()
    closing = headers is not None and headers.get("Connection") == "close"
    return make_mocked_request(
        "POST", "/v1/chat/completions", headers, version=version, protocol=Mock(transport=transport),
        transport=transport, writer=Mock(drain=drained.wait), closing=closing,
    )  # fmt: skip


class Encoder:
    def event(self, event: TextEvent) -> bytes:
        return f"data: {event.text}\n\n".encode()

    def end(self, _: object) -> bytes:
        return b"data: [DONE]\n\n"

    def failure(self, error: PenstockError) -> bytes:
        return f"data: {error.message}\n\n".encode()


def heads(*, has_cors: bool = False, is_draining: bool = False) -> AnswerHeads:
    request_id.set("abc")
    return AnswerHeads(has_cors=has_cors, is_draining=lambda: is_draining)


def streamed(transport: Transport, made_by: AnswerHeads) -> SseResponse:
    pending: Any = SimpleNamespace(event_stream=Encoder, completion=SimpleNamespace(usage=lambda: None))
    config = FrontendConfig(write_buffer_bytes=4096, reader_timeout_s=2.0)
    return SseResponse(asked(transport), pending, config, made_by)


async def test_the_head_of_a_whole_answer_is_that_of_aiohttp() -> None:
    transport = Transport()
    response = heads().whole(asked(transport), BODY)
    await response.prepare(asked(transport))
    assert not transport.sent
    await response.write_eof()
    status, head, body = transport.fields
    assert (status, body, response.keep_alive) == (b"HTTP/1.1 200 OK", BODY, True)
    theirs = json_response(BODY)
    theirs.headers["X-Request-Id"] = "abc"
    await theirs.prepare(make_mocked_request("POST", "/"))
    assert {**head, "Date": ""} == {**theirs.headers, "Date": ""}
    assert head["Date"].endswith("GMT")


async def test_a_streams_head_goes_with_its_first_event_and_the_end_with_its_last() -> None:
    transport = Transport()
    response, by_aiohttp = streamed(transport, heads()), streamed(Transport(), heads(has_cors=True))
    assert response.take(TextEvent(0, "one")) is None
    assert transport.high == 4096
    status, head, body = transport.fields
    assert (status, body) == (b"HTTP/1.1 200 OK", b"b\r\ndata: one\n\n\r\n")
    assert (head["X-Request-Id"], head["Transfer-Encoding"]) == ("abc", "chunked")
    assert by_aiohttp.take(TextEvent(0, "one")) is not None, "aiohttp has to make a head with more lines"
    assert {name: head[name] for name in by_aiohttp.headers} == dict(by_aiohttp.headers)
    await response.finish()
    assert transport.sent.endswith(b"\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    sent = transport.sent
    await response.prepare(asked(transport))
    await response.write_eof()
    assert (transport.sent, response.keep_alive) == (sent, True)


@pytest.mark.parametrize(
    ("headers", "version", "options"),
    [
        ({"Connection": "close"}, HttpVersion11, {}),
        ({}, HttpVersion10, {}),
        ({}, HttpVersion11, {"has_cors": True}),
        ({}, HttpVersion11, {"is_draining": True}),
    ],
    ids=["client closes", "HTTP/1.0", "CORS", "draining"],
)
async def test_other_heads_are_aiohttps(
    headers: dict[str, str], version: Any, options: dict[str, bool]
) -> None:
    response = heads(**options).whole(asked(Transport(), headers, version), BODY)
    assert isinstance(response, web.Response)


async def test_a_client_that_is_gone_ends_the_request_and_a_failure_ends_a_stream_once() -> None:
    with pytest.raises(ConnectionResetError):
        await heads().whole(asked(Transport(closing=True)), BODY).write_eof()
    transport = Transport()
    response = streamed(transport, heads())
    response.take(TextEvent(0, "one"))
    await response.fail(PenstockError("broken"))
    await response.write_eof()
    assert transport.sent.endswith(b"data: broken\n\n\r\n0\r\n\r\n")
    assert transport.sent.count(b"0\r\n\r\n") == 1


@pytest.mark.virtual
@pytest.mark.parametrize(("seconds", "cut_s"), [(0.0, 2.0), (99.5, 102.0)])
@pytest.mark.parametrize("at_the_end", [False, True])
async def test_who_takes_a_little_now_and_then_is_waited_for_and_who_takes_nothing_is_not(
    seconds: float, cut_s: float, *, at_the_end: bool
) -> None:
    response = streamed(Transport(unread=10_000, seconds=seconds), heads())
    hold = response.take(TextEvent(0, "one"))
    assert hold is not None
    with pytest.raises(DeadlineExceeded, match="took nothing of its stream for 2 s"):
        await (response.finish() if at_the_end else hold())
    assert asyncio.get_running_loop().time() == pytest.approx(cut_s, abs=2.1)
