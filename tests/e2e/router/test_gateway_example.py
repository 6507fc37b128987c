"""The example gateway where its router or a server is away: clear answers, and no tracebacks."""

import asyncio
import importlib.util
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from penstock.core.types.instances import InstanceState
from penstock.frontend.http.routing_http import RoutingHttpConfig, RoutingServer
from penstock.router.service.gateway import Server
from penstock.router.service.routing_service import RoutingService
from tests.support.scenes import scenes

FILE = Path(__file__).parents[3] / "examples" / "gateway.py"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gateway_example", FILE)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


async def serve(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


async def speak(request: web.Request) -> web.StreamResponse:
    """Answer whole, break off in the middle of a stream, or be too busy."""
    if (await request.json()).get("user") == "unlucky":
        return web.json_response({"error": {}}, status=429, headers={"Retry-After": "7"})
    if not (await request.json()).get("stream"):
        return web.json_response({"usage": {"prompt_tokens_details": {"cached_tokens": 0}}})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    assert request.transport is not None
    request.transport.abort()
    return response


Ask = Callable[..., Awaitable[tuple[int, Any]]]


def run_scenario(
    scene: Callable[[Ask, web.AppRunner, RoutingServer, RoutingService], Awaitable[None]],
) -> None:
    """Run a gateway between a router and one server."""

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", speak)])
        server, server_url = await serve(app)
        async with RoutingService(rng=random.Random(0), registry=CollectorRegistry()) as service:
            routing = RoutingServer(service, RoutingHttpConfig(port=0), CollectorRegistry())
            host, port = await routing.start()
            gateway = example().Gateway(f"http://{host}:{port}", [server_url])
            await gateway.register()
            front = web.Application()
            front.cleanup_ctx.append(gateway.connect)
            front.add_routes([web.post("/chat", gateway.chat)])
            runner, url = await serve(front)
            async with aiohttp.ClientSession() as http:

                async def ask(body: object) -> tuple[int, Any]:
                    async with http.post(f"{url}/chat", json=body) as answer:
                        told = {"retry_after": answer.headers.get("Retry-After")}
                        return answer.status, await answer.json() | told

                try:
                    await scene(ask, server, routing, service)
                finally:
                    for what in (runner, server):
                        await what.cleanup()
                    await routing.close()

    asyncio.run(asyncio.wait_for(main(), 30))


scenario = scenes(run_scenario, 4)


@scenario()
async def test_a_server_that_is_gone_is_a_502_and_a_router_a_503(ask, server, routing, service, caplog):
    assert (await ask(CHAT))[0] == 200
    for body in ([], {"model": "m"}, "text"):
        status, answer = await ask(body)
        said = "expected JSON with model and messages" in answer["error"]["message"]
        assert (status, said) == (400, True)
    await server.cleanup()
    status, answer = await ask(CHAT)
    assert (status, "server1-m does not answer" in answer["error"]["message"]) == (502, True)
    await routing.close()
    status, answer = await ask(CHAT)
    assert (status, "the router http://" in answer["error"]["message"]) == (503, True)
    assert "Traceback" not in caplog.text


@scenario()
async def test_who_is_told_to_come_back_later_is_told_when(ask, server, routing, service):
    status, answer = await ask(CHAT | {"user": "unlucky"})
    assert (status, answer["retry_after"]) == (429, "7"), "by the server"
    (view,) = service.workers()
    await service.put(view.name, Server(url=view.address, model="m", state=InstanceState.DRAINING))
    status, answer = await ask(CHAT)
    assert (status, answer["retry_after"]) == (503, "1"), "by the router"


@scenario()
async def test_an_answer_that_breaks_off_does_not_look_whole(ask, server, routing, service, caplog):
    with pytest.raises(aiohttp.ClientError):
        await ask(CHAT | {"stream": True})
    assert (await ask(CHAT))[0] == 200
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_what_is_away_at_the_start_is_one_line():
    url = "http://127.0.0.1:9"
    command = [sys.executable, str(FILE), url, url, "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("gateway: the router and all servers have to be there: "), ended.stderr
