"""A frontend's server over real sockets: what it tells of itself, listening and closing."""

import asyncio
import json
import re

import openai
import pytest
from frontend_site import IDS, Answer, chat, http, serving

from penstock.core.errors import ConfigError
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.server import FrontendServer
from tests.support.dispatcher import speak


async def test_models_health_and_live() -> None:
    async with serving() as site:
        (model,) = [model async for model in site.client.models.list()]
        assert (model.id, model.owned_by, model.created) == ("tiny", "penstock", 1_700_000_000)
        assert (await site.client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await site.client.models.retrieve("some/other")
        answer = await site.ask("GET", "/health")
        assert (answer.status, json.loads(answer.body)) == (200, {"status": "ok", "models": ["tiny"]})
        site.dispatcher.cards = {}
        answer = await site.ask("GET", "/health")
        assert (answer.status, json.loads(answer.body)["reason"]) == (503, "no worker is ready")
        assert (await site.ask("GET", "/live")).status == 200


async def test_request_ids_are_echoed_or_made() -> None:
    async with serving() as site:
        assert (await site.ask("GET", "/live", b"", "X-Request-Id: mine")).headers["x-request-id"] == "mine"
        body = chat(stream=True)
        answer = await site.ask("POST", "/v1/chat/completions", body, "X-Request-Id: mine")
        assert answer.headers["x-request-id"] == "mine"
        made = {(await site.ask("GET", "/nowhere")).headers["x-request-id"] for _ in range(2)}
        made.add((await site.ask("GET", "/live", b"", "X-Request-Id: " + "x" * 500)).headers["x-request-id"])
        assert len(made) == 3


async def test_metrics_have_no_times_of_creation() -> None:
    async with serving() as site:
        await site.ask("POST", "/v1/chat/completions", chat())
        assert b"_created" not in (await site.ask("GET", "/metrics")).body


async def test_closing_lets_streams_finish_and_takes_nothing_new() -> None:
    async with serving(speak(IDS, pause_s=0.01)) as site:
        idle_reader, idle_writer = await site.connect()
        running = asyncio.ensure_future(site.ask("POST", "/v1/chat/completions", chat(stream=True)))
        await site.until(lambda: site.dispatcher.open_streams == 1)
        closing = asyncio.ensure_future(site.server.close())
        await asyncio.sleep(0.02)
        with pytest.raises(ConnectionError):
            await site.connect()
        # A connection that was there is still answered, and then closed.
        idle_writer.write(http("GET", "/health"))
        assert Answer(await idle_reader.read()).status == 503
        idle_writer.close()
        answer = await running
        assert b"[DONE]" in answer.body
        await closing


@pytest.mark.parametrize("hurried", [False, True])
async def test_closing_ends_what_takes_too_long_and_says_how_long_it_waited(
    capfd: pytest.CaptureFixture[str], *, hurried: bool
) -> None:
    script = speak(IDS * 100, pause_s=3600)
    async with serving(script, drain_timeout_s=600 if hurried else 0.1) as site:
        running = asyncio.ensure_future(site.ask("POST", "/v1/chat/completions", chat()))
        await site.until(lambda: site.dispatcher.open_streams == 1)
        closing = asyncio.ensure_future(site.server.close())
        await asyncio.sleep(0)
        while hurried and not closing.done():  # until it drains there is nothing to hurry
            site.server.hurry()
            await asyncio.sleep(0.01)
        await closing
        assert "the server is shutting down" in (await running).error["message"]
    out, err = capfd.readouterr()
    (after_s,) = re.findall(r"requests_cancelled +after_s=([0-9.]+) requests=1", out + err)
    assert float(after_s) < 600 if hurried else float(after_s) >= 0.1


async def test_a_taken_port_is_one_clear_error() -> None:
    async with serving() as site:
        frontend = Frontend(FrontendConfig(port=site.port), site.dispatcher, hash_key=bytes(16))
        with pytest.raises(ConfigError, match=f"port {site.port}: Address already in use; .* --port"):
            await FrontendServer(frontend).start()
