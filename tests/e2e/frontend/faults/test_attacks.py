"""Clients that attack by time and memory, over real sockets: they hold little, for a bounded time, and nobody else waits for them."""

import asyncio
import socket

import pytest
from frontend_site import SPEAK, Answer, Site, chat, http, serving

from penstock.core.types.requests import FinishReason
from tests.support.dispatcher import speak

CHAT = "/v1/chat/completions"
MANY = 100


async def slow_socket(site: Site, receive_bytes: int = 4096) -> socket.socket:
    """Connect a socket that takes little at once; the kernel heeds the size only before it connects."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", site.port))
    return client


async def answered(site: Site) -> None:
    """Check that an honest client is answered, soon."""
    async with asyncio.timeout(5):
        answer = await site.ask("POST", CHAT, chat())
    assert answer.status == 200, answer.body


async def ended(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("begun", "goes_on"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\nX-A: ", True),
        (http("POST", CHAT, b"", "Content-Length: 100000") + b"{", False),
        (http("POST", CHAT, b"", "Transfer-Encoding: chunked") + b"1\r\n{\r\n", False),
    ],
    ids=["headers", "body", "chunks"],
)
async def test_hundreds_of_slow_senders_are_ended_in_time_and_nobody_waits(
    begun: bytes, goes_on: bool
) -> None:
    async with serving(receive={"timeout_s": 1.0}, inflight_max=4) as site:
        clients = [await site.connect() for _ in range(MANY)]
        for _, writer in clients:
            writer.write(begun)
        for _ in range(10):  # bytes that come now and then give no more time
            await asyncio.sleep(0.02)
            for _, writer in clients:
                if goes_on:
                    writer.write(b"a")
        await answered(site)
        assert site.frontend.admission.inflight == 0, "they take no place of those in flight"
        assert site.frontend.budget.size_bytes < MANY * 4096
        async with asyncio.timeout(20):
            heads = await asyncio.gather(*(reader.readuntil(b"\r\n\r\n") for reader, _ in clients))
        assert {Answer(head).status for head in heads} == {408}
        for _, writer in clients:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in clients), return_exceptions=True)
        await site.until(lambda: site.frontend.budget.size_bytes == 0)
        await answered(site)


async def test_connections_that_never_say_anything_are_closed() -> None:
    async with serving(keepalive_timeout_s=0.5) as site:
        clients = [await site.connect() for _ in range(MANY)]
        await answered(site)
        async with asyncio.timeout(20):
            ends = await asyncio.gather(*(ended(reader) for reader, _ in clients))
        assert ends == [b""] * MANY
        for _, writer in clients:
            writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_readers_that_stop_are_cut_off_with_what_they_hold(stream: bool) -> None:
    long = speak([5] * 400_000, at_once=20_000, finish=FinishReason.LENGTH)
    async with serving(long, reader_timeout_s=0.5, write_buffer_bytes=4096) as site:
        loop = asyncio.get_running_loop()
        clients = [await slow_socket(site) for _ in range(5)]
        for client in clients:
            await loop.sock_sendall(client, http("POST", CHAT, chat(stream=stream)))
        server = site.server._runner.server
        await site.until(lambda: len(site.dispatcher.opened) == len(clients))
        site.dispatcher.script = SPEAK
        await answered(site)
        await site.until(lambda: not server.connections)
        assert site.frontend.admission.inflight == 0
        for client in clients:
            client.close()
        await answered(site)


async def test_a_client_that_pipelines_and_never_reads_gets_no_more_than_its_buffer_holds() -> None:
    long = speak([5] * 20_000, at_once=20_000, finish=FinishReason.LENGTH)
    async with serving(long) as site:
        loop = asyncio.get_running_loop()
        client = await slow_socket(site)
        await site.until(lambda: len(site.server._runner.server.connections) == 1)
        (connection,) = site.server._runner.server.connections
        flood = loop.create_task(loop.sock_sendall(client, http("POST", CHAT, chat()) * 400))
        try:
            await site.until(lambda: connection.writing_paused)
            opened, size = len(site.dispatcher.opened), connection.transport.get_write_buffer_size()
            site.dispatcher.script = SPEAK
            for _ in range(10):
                await answered(site)
            assert len(site.dispatcher.opened) == opened + 10, "no more of the pipelined requests"
            assert connection.transport.get_write_buffer_size() == size
        finally:
            flood.cancel()
            client.close()
        await site.until(lambda: not connection.connected)
        await answered(site)
