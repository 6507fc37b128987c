"""Clients that go away, or do not read: over real sockets, they cost nobody else anything."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from frontend_site import HI, IDS, SPEAK, TEXT, Site, chat, http, serving

from penstock.core.types.requests import Delta, Request
from penstock.core.wire import pack_tokens
from tests.support.dispatcher import speak


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("abrupt", [True, False])
async def test_a_client_that_goes_away_before_the_first_token_cancels(stream: bool, abrupt: bool) -> None:
    async with serving(speak(IDS, pause_s=3600)) as site:
        _, writer = await site.connect()
        writer.write(http("POST", "/v1/chat/completions", chat(stream=stream)))
        await site.until(lambda: site.dispatcher.open_streams == 1)
        writer.transport.abort() if abrupt else writer.close()
        await site.until(lambda: site.dispatcher.open_streams == 0)
        assert site.dispatcher.cancelled == 1
        await site.until(lambda: site.frontend.admission.inflight == 0)


async def test_a_client_that_goes_away_in_a_stream_cancels_every_choice() -> None:
    async def says_one(request: Request) -> AsyncIterator[Delta]:
        yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))
        await asyncio.sleep(3600)

    async with serving(says_one) as site:
        stream = await site.client.chat.completions.create(model="tiny", messages=HI, n=3, stream=True)
        await anext(stream)
        assert site.dispatcher.open_streams == 3
        await stream.close()
        await site.until(lambda: site.dispatcher.open_streams == 0)
        assert site.dispatcher.cancelled == 3
        metric = 'penstock_frontend_requests_total{code="499",route="/v1/chat/completions"}'
        assert await site.metric(metric) == 1


async def stall(site: Site, **fields: Any) -> socket.socket:
    """Ask for a stream and never read it."""
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(stalled, ("127.0.0.1", site.port))
    await loop.sock_sendall(
        stalled, http("POST", "/v1/chat/completions", chat(stream=True, max_tokens=7, **fields))
    )
    return stalled


async def test_a_reader_that_stalls_holds_back_its_own_stream_only() -> None:
    taken = 0

    async def endless(request: Request) -> AsyncIterator[Delta]:
        nonlocal taken
        if request.sampling.max_tokens != 7:
            async for delta in SPEAK(request):
                yield delta
            return
        while True:
            await asyncio.sleep(0)
            taken += 1
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))

    async with serving(endless) as site:
        stalled = await stall(site)
        await site.until(lambda: taken > 0)
        for _ in range(5):
            whole = await site.client.chat.completions.create(model="tiny", messages=HI)
            assert whole.choices[0].message.content == TEXT
        before = -1
        while before != taken:
            before = taken
            await asyncio.sleep(0.1)
        assert taken < 5000, "of some 200 bytes each"
        stalled.close()
        await site.until(lambda: site.dispatcher.open_streams == 0)


@pytest.mark.parametrize("limit", ["request_timeout_s", "reader_timeout_s"])
async def test_a_reader_that_stalls_is_cut_off_when_its_time_is_up(limit: str) -> None:
    async def endless(request: Request) -> AsyncIterator[Delta]:
        while True:
            await asyncio.sleep(0)
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))

    async with serving(endless, **{limit: 0.5}) as site:
        stalled = await stall(site)
        await site.until(lambda: site.dispatcher.open_streams == 1)
        await site.until(lambda: site.dispatcher.open_streams == 0)
        await site.until(lambda: site.frontend.admission.inflight == 0)
        received = b""
        with contextlib.suppress(ConnectionResetError), stalled:
            while data := await asyncio.get_running_loop().sock_recv(stalled, 1 << 20):
                received += data
        assert received
        assert not received.endswith(b"0\r\n\r\n")  # the client can tell that this is not the end
