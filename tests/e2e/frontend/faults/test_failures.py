"""Requests that fail behind a frontend, before the first token or in a stream, over real sockets."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from frontend_site import HI, IDS, chat, serving

from penstock.core.errors import EngineError, Unavailable
from penstock.core.types.requests import Delta, Request
from penstock.core.wire import pack_tokens


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

    async with serving(slow, request_timeout_s=0.2) as site:
        answer = await site.ask("POST", "/v1/chat/completions", chat())
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        answer = await site.ask("POST", "/v1/chat/completions", chat(stream=True, max_tokens=5))
        assert answer.status == 200
        assert b"deadline_exceeded" in answer.body
