"""Probes of a host by HTTP: what they are told, and callers that send nonsense."""

import asyncio
import json

import pytest

from penstock.core.errors import ConfigError
from penstock.deploy.control.server import ProbeServer


async def ask(port: int, request: bytes) -> tuple[str, dict | None]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), json.loads(body) if body else None


async def test_it_is_live_at_once_and_ready_once_all_processes_are() -> None:
    waits_for = {"decode-1": "loads the engine"}
    async with ProbeServer("tcp://127.0.0.1:0", lambda: waits_for) as server:
        live, ready = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"
        assert await ask(server.port, live) == ("HTTP/1.1 200 OK", {"status": "live"})
        status, body = await ask(server.port, ready)
        assert (status, body) == (
            "HTTP/1.1 503 Service Unavailable",
            {"status": "unavailable", "processes": {"decode-1": "loads the engine"}},
        )
        waits_for.clear()
        assert await ask(server.port, ready) == ("HTTP/1.1 200 OK", {"status": "ready"})


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"POST /live HTTP/1.1\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        (b"\x16\x03\x01\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        (b"GET /live HTTP/1.1\r\n", ""),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", ""),
    ],
)
async def test_nonsense_is_refused_and_harms_nobody(request_: bytes, status: str) -> None:
    async with ProbeServer("tcp://127.0.0.1:0", dict) as server:
        assert (await ask(server.port, request_))[0] == status
        assert (await ask(server.port, b"GET /live HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"


async def test_a_port_that_is_taken_is_said() -> None:
    async with ProbeServer("tcp://127.0.0.1:0", dict) as first:
        with pytest.raises(ConfigError, match=r"runtime.probes: cannot listen at tcp://127.0.0.1:\d+: "):
            await ProbeServer(f"tcp://127.0.0.1:{first.port}", dict).__aenter__()
