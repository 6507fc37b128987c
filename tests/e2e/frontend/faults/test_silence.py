"""Streams that are silent for long, over real sockets: headers and comments come, and errors after them."""

import asyncio
from collections.abc import AsyncIterator

from frontend_site import HI, IDS, SPEAK, STOP_TOKEN, TEXT, Answer, Site, chat, http, serving

from penstock.core.errors import Overloaded
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import pack_tokens
from tests.support.dispatcher import Script

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
