"""The head that is made of constant lines says what aiohttp's head would say."""

import asyncio
import http.client
import io
from collections.abc import Callable
from contextvars import Context
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.test_utils import make_mocked_request

from penstock.core.errors import PenstockError
from penstock.frontend.config import FrontendConfig
from penstock.frontend.http import heads as heads_module
from penstock.frontend.http.heads import Heads, WholeResponse
from penstock.frontend.http.replies import json_response, request_id
from penstock.frontend.http.sse_response import _HEADERS, SseResponse
from penstock.frontend.text.events import TextEvent

BODY = '{"text":"é"}'.encode()


class Transport(asyncio.Transport):
    def __init__(self, *, closing: bool = False) -> None:
        super().__init__()
        self.sent = b""
        self._closing = closing

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return 0


def asked(
    transport: Transport, headers: dict[str, str] | None = None, version: Any = HttpVersion11
) -> web.Request:
    protocol = Mock(transport=transport)
    return make_mocked_request(
        "POST",
        "/v1/chat/completions",
        headers,
        version=version,
        protocol=protocol,
        transport=transport,
        closing=headers is not None and headers.get("Connection") == "close",
    )


class Encoder:
    def event(self, event: TextEvent) -> bytes:
        return f"data: {event.text}\n\n".encode()

    def end(self, _: object) -> bytes:
        return b"data: [DONE]\n\n"

    def failure(self, error: PenstockError) -> bytes:
        return f"data: {error.message}\n\n".encode()


def streamed(
    transport: Transport, *, has_cors: bool = False, is_draining: Callable[[], bool] = lambda: False
) -> SseResponse:
    request_id.set("abc")
    pending = SimpleNamespace(event_stream=Encoder, completion=SimpleNamespace(usage=lambda: None))
    heads = Heads(has_cors=has_cors, is_draining=is_draining)
    return SseResponse(asked(transport), pending, FrontendConfig(write_buffer_bytes=4096), heads)


def fields(sent: bytes) -> tuple[bytes, dict[str, str], bytes]:
    head, _, body = sent.partition(b"\r\n\r\n")
    status, _, lines = head.partition(b"\r\n")
    return status, dict(http.client.parse_headers(io.BytesIO(lines + b"\r\n\r\n"))), body


def test_the_head_is_that_of_aiohttp() -> None:
    async def main() -> None:
        request_id.set("abc")
        transport = Transport()
        response = Heads(has_cors=False, is_draining=lambda: False).whole(asked(transport), BODY)
        assert isinstance(response, WholeResponse)
        assert response.keep_alive
        assert response.status == 200
        await response.prepare(asked(transport))
        assert not transport.sent
        await response.write_eof()
        status, head, body = fields(transport.sent)
        assert status == b"HTTP/1.1 200 OK"
        assert body == BODY
        theirs = json_response(BODY)
        theirs.headers["X-Request-Id"] = "abc"
        await theirs.prepare(asked(Transport()))
        assert set(head) == set(theirs.headers)
        assert {**head, "Date": ""} == {**theirs.headers, "Date": ""}
        assert head["Date"].endswith("GMT")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "version", "has_cors", "is_draining"),
    [
        ({"Connection": "close"}, HttpVersion11, False, False),
        ({}, HttpVersion10, False, False),
        ({}, HttpVersion11, True, False),
        ({}, HttpVersion11, False, True),
    ],
    ids=["client closes", "HTTP/1.0", "CORS", "draining"],
)
def test_other_heads_are_aiohttps(
    headers: dict[str, str], version: Any, has_cors: bool, is_draining: bool
) -> None:
    async def main() -> None:
        request_id.set("abc")
        heads = Heads(has_cors=has_cors, is_draining=lambda: is_draining)
        response = heads.whole(asked(Transport(), headers, version), BODY)
        assert isinstance(response, web.Response)

    asyncio.run(main())


def test_a_client_that_is_gone_ends_the_request() -> None:
    async def main() -> None:
        request_id.set("abc")
        heads = Heads(has_cors=False, is_draining=lambda: False)
        response = heads.whole(asked(Transport(closing=True)), BODY)
        with pytest.raises(ConnectionResetError):
            await response.write_eof()

    asyncio.run(main())


def test_a_streams_head_goes_with_its_first_event_and_the_end_with_its_last() -> None:
    async def main() -> None:
        transport = Transport()
        response = streamed(transport)
        assert not response.prepared
        assert response.take(TextEvent(0, "one")) is None
        assert response.prepared
        assert transport.high == 4096
        status, head, body = fields(transport.sent)
        assert status == b"HTTP/1.1 200 OK"
        assert body == b"b\r\ndata: one\n\n\r\n"
        theirs = web.StreamResponse(headers={"X-Request-Id": "abc", **_HEADERS})
        await theirs.prepare(asked(Transport()))
        assert {**head, "Date": ""} == {**theirs.headers, "Date": ""}
        await response.finish()
        assert transport.sent.endswith(b"\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        sent = transport.sent
        await response.prepare(asked(transport))
        await response.write_eof()
        assert transport.sent == sent
        assert response.keep_alive

    asyncio.run(main())


def test_a_stream_that_fails_is_ended_once() -> None:
    async def main() -> None:
        transport = Transport()
        response = streamed(transport)
        response.take(TextEvent(0, "one"))
        await response.fail(PenstockError("broken"))
        await response.write_eof()
        assert transport.sent.endswith(b"data: broken\n\n\r\n0\r\n\r\n")
        assert transport.sent.count(b"0\r\n\r\n") == 1

    asyncio.run(main())


def test_aiohttp_makes_a_streams_head_with_more_lines() -> None:
    async def main() -> None:
        response = streamed(Transport(), has_cors=True)
        hold = response.take(TextEvent(0, "one"))
        assert hold is not None
        assert response.headers["Content-Type"].startswith("text/event-stream")

    asyncio.run(main())


def test_a_streams_head_is_made_with_its_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        draining = False
        transport = Transport()
        queued, other = (streamed(each, is_draining=lambda: draining) for each in (transport, Transport()))
        monkeypatch.setattr(heads_module, "wall_time_s", lambda: 86400.0)
        assert Context().run(queued.take, TextEvent(0, "one")) is None, "from a worker's connection"
        head = fields(transport.sent)[1]
        assert (head["Date"], head["X-Request-Id"]) == ("Fri, 02 Jan 1970 00:00:00 GMT", "abc")
        draining = True
        assert queued.take(TextEvent(0, "two")) is None
        assert queued.keep_alive
        assert other.take(TextEvent(0, "one")) is not None, (
            "aiohttp's head says that the connection is closed"
        )
        assert other.headers["Content-Type"].startswith("text/event-stream")

    asyncio.run(main())
