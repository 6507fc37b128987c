"""The head that is made of constant lines says what aiohttp's head would say."""

import asyncio
import http.client
import io
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.test_utils import make_mocked_request

from penstock.frontend.http.replies import json_response, request_id
from penstock.frontend.http.whole_response import WholeResponse, WholeResponses

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


def fields(sent: bytes) -> tuple[bytes, dict[str, str], bytes]:
    head, _, body = sent.partition(b"\r\n\r\n")
    status, _, lines = head.partition(b"\r\n")
    return status, dict(http.client.parse_headers(io.BytesIO(lines + b"\r\n\r\n"))), body


def test_the_head_is_that_of_aiohttp() -> None:
    async def main() -> None:
        request_id.set("abc")
        transport = Transport()
        response = WholeResponses(has_cors=False, is_draining=lambda: False).of(asked(transport), BODY)
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
        responses = WholeResponses(has_cors=has_cors, is_draining=lambda: is_draining)
        response = responses.of(asked(Transport(), headers, version), BODY)
        assert isinstance(response, web.Response)

    asyncio.run(main())


def test_a_client_that_is_gone_ends_the_request() -> None:
    async def main() -> None:
        request_id.set("abc")
        responses = WholeResponses(has_cors=False, is_draining=lambda: False)
        response = responses.of(asked(Transport(closing=True)), BODY)
        with pytest.raises(ConnectionResetError):
            await response.write_eof()

    asyncio.run(main())
