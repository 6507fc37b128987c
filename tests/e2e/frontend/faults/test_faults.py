"""Requests that fail behind a frontend, streams that are silent, and clients that attack by time and memory, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator

import openai
import pytest
from frontend_site import HI, IDS, SPEAK, STOP_TOKEN, TEXT, Answer, Site, chat, http, serving

from penstock.core.errors import EngineError, Overloaded, Unavailable
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import pack_tokens
from tests.support.dispatcher import Script, speak


async def test_a_failure_before_the_first_token_has_its_own_status() -> None:
    async def failing(request: Request) -> AsyncIterator[Delta]:
        raise Unavailable("no worker is left", retry_after_s=1.5)
        yield Delta(request_id=request.request_id)

    async with serving(failing) as site:
        for stream in (True, False):
            answer = await site.ask("POST", "/v1/chat/completions", chat(stream=stream))
            assert answer.status == 503
            assert answer.headers["retry-after"] == "2"
            assert answer.error == {
                "message": "no worker is left", "type": "server_error", "param": None, "code": "unavailable",
            }  # fmt: skip


async def test_a_failure_in_a_stream_is_an_event_without_done() -> None:
    async def failing(request: Request) -> AsyncIterator[Delta]:
        yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))
        raise EngineError("the engine failed on this request")

    async with serving(failing) as site:
        answer = await site.ask("POST", "/v1/chat/completions", chat(stream=True))
        assert answer.status == 200
        assert b'"code":"engine_error"' in answer.body
        assert b"[DONE]" not in answer.body
        stream = await site.client.chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed"):
            async for _ in stream:
                pass
        metrics = (await site.ask("GET", "/metrics")).body.decode()
        assert 'penstock_frontend_requests_total{code="500",route="/v1/chat/completions"} 2.0' in metrics


async def test_an_unexpected_failure_is_a_500_without_details(capfd: pytest.CaptureFixture[str]) -> None:
    async def broken(request: Request) -> AsyncIterator[Delta]:
        if request.sampling.max_tokens == 5:
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))
        raise KeyError("secret")

    async with serving(broken) as site:
        answer = await site.ask("POST", "/v1/chat/completions", chat(), "X-Request-Id: find-me")
        assert answer.status == 500
        assert "secret" not in answer.error["message"]
        body = chat(stream=True, max_tokens=5)
        answer = await site.ask("POST", "/v1/chat/completions", body, "X-Request-Id: me-too")
        assert answer.status == 200
        assert b'{"error":{"message":"the server failed' in answer.body
        assert answer.body.count(b"HTTP/1.1") == 0
        assert b"secret" not in answer.body
    out, err = capfd.readouterr()
    assert "find-me" in out + err
    assert "me-too" in out + err


async def test_time_is_up_before_and_in_a_stream() -> None:
    async def slow(request: Request) -> AsyncIterator[Delta]:
        if request.num_emitted == 0 and request.sampling.max_tokens == 5:
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))
        await asyncio.sleep(3600)

    async with serving(slow, request_timeout_s=2.0) as site:
        answer = await site.ask("POST", "/v1/chat/completions", chat())
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        answer = await site.ask("POST", "/v1/chat/completions", chat(stream=True, max_tokens=5))
        assert answer.status == 200
        assert b"deadline_exceeded" in answer.body


PATH = "/v1/chat/completions"
QUICK = {"headers_after_s": 0.05, "heartbeat_s": 0.05}
HEARTBEAT = b": heartbeat\n\n"


def held(*may_go_on: asyncio.Event) -> Script:
    """Say a part of the answer after each of these."""

    async def script(request: Request) -> AsyncIterator[Delta]:
        ids = [*IDS, STOP_TOKEN]
        for part, go_on, reason in zip((ids[:3], ids[3:]), may_go_on, (None, FinishReason.STOP), strict=True):
            await go_on.wait()
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(part), finish_reason=reason)

    return script


async def begun(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream, and read its headers."""
    reader, writer = await site.connect()
    writer.write(http("POST", PATH, chat(stream=True), "Connection: close"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"text/event-stream" in head
    return reader, writer


async def test_headers_and_comments_come_while_there_is_no_token() -> None:
    first, second = asyncio.Event(), asyncio.Event()
    async with serving(held(first, second), stream=QUICK) as site:
        reader, writer = await begun(site)
        for go_on in (first, second):
            for _ in range(2):
                await reader.readuntil(HEARTBEAT)
            go_on.set()
            if go_on is first:
                await reader.readuntil(b"data: ")
        assert (await reader.read()).count(b"data: [DONE]") == 1
        writer.close()


async def test_clients_pass_over_comments() -> None:
    go_on = asyncio.Event()
    async with serving(held(go_on, go_on), stream=QUICK) as site:
        asyncio.get_running_loop().call_later(0.2, go_on.set)
        stream = await site.client.chat.completions.create(model="tiny", messages=HI, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT


async def test_an_early_error_has_its_status_and_a_late_one_is_an_event() -> None:
    late = asyncio.Event()

    async def refuses(request: Request) -> AsyncIterator[Delta]:
        await late.wait()
        raise Overloaded("every queue is full", retry_after_s=3)
        yield Delta(request_id=request.request_id)

    async with serving(refuses, stream=QUICK) as site:
        reader, writer = await begun(site)
        await reader.readuntil(HEARTBEAT)
        late.set()
        rest = await reader.read()
        assert b'data: {"error":{"message":"every queue is full"' in rest
        assert b"[DONE]" not in rest
        writer.close()
        name = 'penstock_frontend_requests_total{code="503",route="/v1/chat/completions"}'
        await site.until(lambda: site.dispatcher.open_streams == 0)
        assert await site.metric(name) == 1
    async with serving(refuses) as site:
        answer = await site.ask("POST", PATH, chat(stream=True))
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")


async def test_timers_of_a_stream_end_with_it() -> None:
    async with serving(SPEAK, stream=QUICK) as site:
        reader, writer = await site.connect()
        for _ in range(2):
            writer.write(http("POST", PATH, chat(stream=True)))
            await reader.readuntil(b"data: [DONE]\n\n")
            await asyncio.sleep(0.15)
        writer.write(http("GET", "/live"))  # nothing came in between that would break the next answer
        assert Answer((await reader.readuntil(b"}")).lstrip(b"\r\n0")).status == 200
        writer.close()


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
    """Check that an honest client is answered."""
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
    async with serving(receive={"timeout_s": 3.0}, inflight_max=4) as site:
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
        await site.until(lambda: len(site.dispatcher.opened) == len(clients))
        site.dispatcher.script = SPEAK
        await answered(site)
        await site.until(lambda: site.frontend.admission.inflight == 0)
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
