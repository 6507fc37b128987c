"""Clients that go away, or do not read: over real sockets, they cost nobody else anything."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from frontend_site import HI, IDS, SPEAK, TEXT, Site, chat, http, run, serving

from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import pack_tokens
from penstock.frontend.http.sse_response import SseResponse
from penstock.frontend.text.events import TextEvent
from penstock.seams.dispatch import Hold
from tests.support.dispatcher import speak


@pytest.mark.alone
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("abrupt", [True, False])
def test_a_client_that_goes_away_before_the_first_token_cancels(stream: bool, abrupt: bool) -> None:
    async def test() -> None:
        async with serving(speak(IDS, pause_s=3600)) as site:
            _, writer = await site.connect()
            writer.write(http("POST", "/v1/chat/completions", chat(stream=stream)))
            await site.until(lambda: site.dispatcher.open_streams == 1)
            writer.transport.abort() if abrupt else writer.close()
            took_s = await site.until(lambda: site.dispatcher.open_streams == 0)
            assert took_s < 0.1
            assert site.dispatcher.cancelled == 1
            await site.until(lambda: site.frontend.admission.inflight == 0)

    run(test)


@pytest.mark.alone
def test_a_client_that_goes_away_in_a_stream_cancels_every_choice() -> None:
    async def test() -> None:
        async with serving(speak(IDS * 100, pause_s=0.005)) as site:
            stream = await site.client.chat.completions.create(model="tiny", messages=HI, n=3, stream=True)
            await anext(stream)
            assert site.dispatcher.open_streams == 3
            await stream.close()
            assert await site.until(lambda: site.dispatcher.open_streams == 0) < 0.1
            assert site.dispatcher.cancelled == 3
            metrics = (await site.ask("GET", "/metrics")).body.decode()
            assert 'penstock_frontend_requests_total{code="499",route="/v1/chat/completions"} 1.0' in metrics

    run(test)


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


def test_a_reader_that_stalls_holds_back_its_own_stream_only() -> None:
    taken = {"stalled": 0}

    async def endless(request: Request) -> AsyncIterator[Delta]:
        if request.sampling.max_tokens != 7:
            async for delta in SPEAK(request):
                yield delta
            return
        while True:
            await asyncio.sleep(0)
            taken["stalled"] += 1
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))

    async def test() -> None:
        async with serving(endless) as site:
            loop = asyncio.get_running_loop()
            stalled = await stall(site)
            before = -1
            while not taken["stalled"] or before != taken["stalled"]:  # until it has begun and stands still
                before = taken["stalled"]
                await asyncio.sleep(0.1)
            assert 0 < taken["stalled"] < 5000  # of some 200 bytes each
            start = loop.time()
            for _ in range(5):
                whole = await site.client.chat.completions.create(model="tiny", messages=HI)
                assert whole.choices[0].message.content == TEXT
            assert loop.time() - start < 2
            assert taken["stalled"] == before
            stalled.close()
            assert await site.until(lambda: site.dispatcher.open_streams == 0) < 0.1

    run(test)


def test_a_reader_that_stalls_before_the_last_event_is_cut_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens end just below the mark at which writing waits, and the usage that follows crosses it."""
    sent: list[SseResponse] = []
    take = SseResponse.take

    def note(response: SseResponse, event: TextEvent) -> Hold | None:
        sent[:] = [response]
        return take(response, event)

    monkeypatch.setattr(SseResponse, "take", note)

    async def just_enough(request: Request) -> AsyncIterator[Delta]:
        for index in range(5000):
            await asyncio.sleep(0)
            transport = sent[0]._request.transport if sent else None
            if transport is not None:
                room = sent[0]._write_buffer_bytes - transport.get_write_buffer_size()
                if 245 <= room < 560:
                    break
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[: 1 + (index % 3 == 0)]))
        yield Delta(
            request_id=request.request_id, token_ids=pack_tokens(IDS[:1]), finish_reason=FinishReason.LENGTH
        )

    async def test() -> None:
        async with serving(just_enough, request_timeout_s=2) as site:
            stalled = await stall(site, stream_options={"include_usage": True})
            await site.until(lambda: site.dispatcher.open_streams == 1)
            await site.until(lambda: site.dispatcher.open_streams == 0)
            await site.until(lambda: site.frontend.admission.inflight == 0, timeout_s=4)
            stalled.close()

    run(test)


@pytest.mark.parametrize("limit", ["request_timeout_s", "reader_timeout_s"])
def test_a_reader_that_stalls_is_cut_off_when_its_time_is_up(limit: str) -> None:
    async def endless(request: Request) -> AsyncIterator[Delta]:
        while True:
            await asyncio.sleep(0)
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))

    async def test() -> None:
        async with serving(endless, **{limit: 0.5}) as site:
            stalled = await stall(site)
            await site.until(lambda: site.dispatcher.open_streams == 1)
            await site.until(lambda: site.dispatcher.open_streams == 0)
            await site.until(lambda: site.frontend.admission.inflight == 0, timeout_s=1)
            received = b""
            with contextlib.suppress(ConnectionResetError), stalled:
                while data := await asyncio.get_running_loop().sock_recv(stalled, 1 << 20):
                    received += data
            assert received
            assert not received.endswith(b"0\r\n\r\n")  # the client can tell that this is not the end

    run(test)
