"""The endpoint picker behind a real Envoy, before servers that note what comes to them."""

import asyncio
import contextlib
import io
import json
import random
import re
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from penstock.core.types.instances import InstanceState
from penstock.frontend.config import EndpointPickerConfig
from penstock.frontend.endpoint_picker import messages
from penstock.frontend.endpoint_picker.exchange import EndpointPicker
from penstock.frontend.endpoint_picker.server import EndpointPickerServer
from penstock.frontend.limits.admission import ReceiveBudget, ReceiveMetrics
from penstock.router.gateway import GatewayServer
from penstock.router.routing_service import RoutingService
from tests.support.certificates import make_authority, make_certificate
from tests.support.envoy import BUFFERED, DUPLEX, envoy

LIMIT_S = 60.0
TOKENS = 20


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - seen from outside
            await asyncio.sleep(0.01)


class Stub:
    """An OpenAI server that streams, and notes each body."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bodies: list[bytes] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.status = 200
        self.port = 0

    async def run(self, stack: contextlib.AsyncExitStack) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "sick"}}, status=self.status)
        if not body or not json.loads(body).get("stream"):
            usage = {"completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 32}}
            return web.json_response({"served": self.name, "path": request.path, "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Served": self.name})
        await response.prepare(request)
        for index in range(TOKENS):
            await response.write(b"data: %d\n\n" % index)
            if not index:
                await self.hold.wait()
        await response.write(
            b'data: {"usage": {"completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 16}}}\n\n'
        )
        return response


@dataclass
class Scene:
    """The service of a picker behind Envoy at `url`, before two servers."""

    service: RoutingService
    stubs: dict[str, Stub]
    url: str
    picker: int
    http: aiohttp.ClientSession
    registry: CollectorRegistry

    async def chat(self, text: str, **more: Any) -> tuple[int, str, str | None]:
        """Ask for a stream; gives status, body and server."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True, **more}
        async with self.http.post(
            f"{self.url}/v1/chat/completions", data=io.BytesIO(json.dumps(body).encode())
        ) as answer:
            return answer.status, await answer.text(), answer.headers.get("X-Served")

    async def open_requests(self, expected: int) -> None:
        await until(lambda: len(self.service.open) == expected)

    def ended(self, outcome: str) -> float:
        return self.registry.get_sample_value("penstock_router_requests_total", {"outcome": outcome}) or 0.0


@contextlib.asynccontextmanager
async def scene(
    tmp_path: Path,
    modes: dict[str, str] = DUPLEX,
    *,
    body_bytes_max: int = 8 << 20,
    body_timeout_s: float = LIMIT_S,
) -> AsyncIterator[Scene]:
    registry = CollectorRegistry()
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(RoutingService(rng=random.Random(1), registry=registry))
        stubs = {name: Stub(name) for name in ("one", "two")}
        for name, stub in stubs.items():
            await stub.run(stack)
            await service.put(name, GatewayServer(url=f"http://127.0.0.1:{stub.port}", model="m"))
        picker = EndpointPicker(service, None, body_bytes_max=body_bytes_max, body_timeout_s=body_timeout_s)
        budget = ReceiveBudget(32 << 20, ReceiveMetrics(registry, "penstock_router"))
        server = EndpointPickerServer(picker, EndpointPickerConfig(port=0), budget)
        _, port = await server.start()
        stack.push_async_callback(server.close)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)))
        url = await stack.enter_async_context(
            envoy(tmp_path, port, [stub.port for stub in stubs.values()], modes)
        )
        yield Scene(service, stubs, url, port, http, registry)


@pytest.mark.parametrize(
    "modes", [DUPLEX, pytest.param(BUFFERED, marks=pytest.mark.nightly)], ids=["duplex", "buffered"]
)
async def test_requests_go_where_their_prefix_is_and_answers_come_whole(tmp_path, modes):
    async with scene(tmp_path, modes) as at:
        for conversation in range(6):
            words = f"Conversation {conversation}. " + "All of its words. " * 40
            first = await at.chat(words)
            assert first[0] == 200, first
            assert first[1].startswith("".join(f"data: {index}\n\n" for index in range(TOKENS)))
            assert "usage" in first[1]
            again = [await at.chat(words + " More.") for _ in range(3)]
            assert {one[2] for one in again} == {first[2]}
        assert all(stub.bodies for stub in at.stubs.values()), "both serve"
        await at.open_requests(0)
        assert at.ended("finished") == 24
        at.service.check()


async def test_a_large_body_comes_as_it_was_sent_and_one_too_large_is_refused(tmp_path):
    async with scene(tmp_path, body_bytes_max=4 << 20) as at:
        text = "".join(random.Random(2).choices("abcdefghij é✓ ", k=1_000_000))
        status, _, served = await at.chat(text)
        assert status == 200
        assert served is not None
        (body,) = at.stubs[served].bodies
        assert json.loads(body)["messages"][0]["content"] == text
        status, refusal, _ = await at.chat("x" * (5 << 20))
        assert status == 413
        assert "4194304 bytes, the limit (body_bytes_max)" in json.loads(refusal)["error"]["message"]
        await at.open_requests(0)


async def test_a_request_counts_until_its_stream_ends_or_its_client_goes(tmp_path):
    async with scene(tmp_path) as at:
        for stub in at.stubs.values():
            stub.hold.clear()
        streams = [asyncio.create_task(at.chat(f"{number} " * 200)) for number in range(4)]
        await until(lambda: sum(len(stub.bodies) for stub in at.stubs.values()) == 4)
        await at.open_requests(4)
        assert [len(stub.bodies) for stub in at.stubs.values()] == [2, 2], "load is shared"
        streams[0].cancel()
        await at.open_requests(3)
        for stub in at.stubs.values():
            stub.hold.set()
        await asyncio.gather(*streams, return_exceptions=True)
        await at.open_requests(0)
        at.service.check()


async def test_refusals_are_answers_of_the_api(tmp_path):
    async with scene(tmp_path) as at:
        status, text, _ = await at.chat("Hello.", model="other")
        assert status == 404
        assert json.loads(text)["error"]["message"] == "model 'other': no worker has it; known: m"
        for name, stub in at.stubs.items():
            url = f"http://127.0.0.1:{stub.port}"
            await at.service.put(name, GatewayServer(url=url, model="m", state=InstanceState.DRAINING))
        async with at.http.post(f"{at.url}/v1/completions", json={"model": "m", "prompt": "x"}) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert answer.content_type == "application/json"


async def test_a_body_that_never_ends_is_given_up(tmp_path):
    async with scene(tmp_path, body_timeout_s=0.5) as at:
        host, port = at.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(LIMIT_S):
            line = await reader.readline()
        assert b" 408 " in line
        writer.close()
        assert not len(at.service.open)


async def test_health_is_what_the_protocol_asks_for(tmp_path):
    async with scene(tmp_path) as at, grpc.aio.insecure_channel(f"127.0.0.1:{at.picker}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT_S)
            return int(answer.status)

        names = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
        assert [await status(name) for name in names] == [1, 1, 1, 1]
        for name in at.stubs:
            await at.service.remove(name)
        assert [await status(name) for name in names] == [2, 1, 2, 2]
        with pytest.raises(grpc.aio.AioRpcError, match="no service 'other'"):
            await status("other")


async def test_the_command_listens_with_tls_and_takes_a_renewed_certificate(tmp_path):
    """Two connections, before and after a renewal; each trusts only the authority of its certificate."""

    authorities = [make_authority(tmp_path, name) for name in ("first", "second")]
    pair = make_certificate(tmp_path, "localhost", authorities[0])
    command = [
        sys.executable, "-m", "penstock", "router", "--port", "0", "--endpoint-picker-port", "0",
        "--set", f"endpoint_picker.tls.certificate={pair.certificate}", "--set", f"endpoint_picker.tls.key={pair.key}",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as http:
            said = dict([(await process.stdout.readline()).decode().split(maxsplit=2)[1:] for _ in range(2)])
            port = re.findall(r":(\d+), with TLS", said["picking"])[0]
            (url,) = re.findall(r"http://\S+", said["ready"])
            body = {"url": "http://10.0.0.1:8000", "model": "m"}
            assert (await http.put(f"{url}/workers/one", json=body)).status == 200
            assert await pick(port, authorities[0]) == "10.0.0.1:8000"
            make_certificate(tmp_path, "localhost", authorities[1])
            assert await pick(port, authorities[1]) == "10.0.0.1:8000"
    finally:
        process.terminate()
        await process.wait()
    assert process.returncode == 0


async def pick(port: str, authority: Path) -> str:
    """Ask for the endpoint of a request without a body, over TLS."""
    trusted = grpc.ssl_channel_credentials(authority.read_bytes())  # noqa: ASYNC240 - small
    request = messages.ProcessingRequest(request_headers=messages.HttpHeaders(end_of_stream=True))
    async with grpc.aio.secure_channel(f"localhost:{port}", trusted) as channel:
        ask = channel.stream_stream(
            f"/{messages.SERVICE}/Process",
            request_serializer=messages.ProcessingRequest.SerializeToString,
            response_deserializer=messages.ProcessingResponse.FromString,
        )
        call = ask(iter([request]))
        answer = await call.read()
    return str(answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"])
