"""Streams that are silent for long, over real sockets: headers and comments come, and errors after them."""

import asyncio
from collections.abc import AsyncIterator

from frontend_site import HI, IDS, SPEAK, STOP_TOKEN, TEXT, Answer, chat, http, run, serving

from penstock.core.errors import Overloaded
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import pack_tokens
from tests.support.dispatcher import Script

PATH = "/v1/chat/completions"
QUICK = {"headers_after_s": 0.05, "heartbeat_s": 0.05}
HEARTBEAT = b": heartbeat\n\n"


def late(first_s: float, then_s: float = 0.0) -> Script:
    """Answer late, and pause once more in the middle."""

    async def script(request: Request) -> AsyncIterator[Delta]:
        ids = [*IDS, STOP_TOKEN]
        for part, pause_s, reason in ((ids[:3], first_s, None), (ids[3:], then_s, FinishReason.STOP)):
            await asyncio.sleep(pause_s)
            yield Delta(
                request_id=request.request_id,
                token_ids=pack_tokens(part),
                finish_reason=reason,
                cached_tokens=0 if reason is None else None,
            )

    return script


def refused_after(pause_s: float) -> Script:
    async def script(request: Request) -> AsyncIterator[Delta]:
        await asyncio.sleep(pause_s)
        raise Overloaded("every queue is full", retry_after_s=3)
        yield Delta(request_id=request.request_id)

    return script


def test_headers_and_comments_come_while_there_is_no_token() -> None:
    async def test() -> None:
        async with serving(late(0.3, 0.3), stream=QUICK) as site:
            reader, writer = await site.connect()
            writer.write(http("POST", PATH, chat(stream=True), "Connection: close"))
            async with asyncio.timeout(0.25):
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"200 OK" in head
                assert b"text/event-stream" in head
                await reader.readuntil(HEARTBEAT)
            rest = await reader.read()
            before, _, after = rest.partition(b"data: ")
            assert before.count(HEARTBEAT) >= 2
            assert after.count(HEARTBEAT) >= 2, "also between tokens"
            assert rest.count(b"data: [DONE]") == 1
            writer.close()

    run(test)


def test_clients_pass_over_comments() -> None:
    async def test() -> None:
        async with serving(late(0.15, 0.15), stream=QUICK) as site:
            stream = await site.client.chat.completions.create(model="tiny", messages=HI, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == TEXT

    run(test)


def test_an_early_error_has_its_status_and_a_late_one_is_an_event() -> None:
    async def test() -> None:
        async with serving(refused_after(0.0), stream=QUICK) as site:
            answer = await site.ask("POST", PATH, chat(stream=True))
            assert (answer.status, answer.headers["retry-after"]) == (503, "3")
        async with serving(refused_after(0.15), stream=QUICK) as site:
            answer = await site.ask("POST", PATH, chat(stream=True))
            assert answer.status == 200
            assert HEARTBEAT in answer.body
            assert b'data: {"error":{"message":"every queue is full"' in answer.body
            assert b"[DONE]" not in answer.body
            metrics = (await site.ask("GET", "/metrics")).body.decode()
            assert 'penstock_frontend_requests_total{code="503",route="/v1/chat/completions"} 1.0' in metrics

    run(test)


def test_a_stream_that_speaks_gets_no_comments_and_its_timers_end_with_it() -> None:
    async def test() -> None:
        async with serving(SPEAK, stream=QUICK) as site:
            reader, writer = await site.connect()
            for _ in range(2):
                writer.write(http("POST", PATH, chat(stream=True)))
                body = await reader.readuntil(b"data: [DONE]\n\n")
                assert HEARTBEAT not in body
                await asyncio.sleep(0.15)
            writer.write(http("GET", "/live"))  # nothing came in between that would break the next answer
            assert Answer((await reader.readuntil(b"}")).lstrip(b"\r\n0")).status == 200
            writer.close()

    run(test)
