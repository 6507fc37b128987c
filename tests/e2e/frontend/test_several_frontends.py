"""Two real frontend processes on one port, in front of the same workers: each knows what the other has there."""

import asyncio
import json

import psutil
import pytest

from penstock.deploy.state import load_admin_token

pytestmark = pytest.mark.slow

STREAMS = 6
WORKERS = ("worker-1", "worker-2")


class FrontendConnection:
    """One connection, and so one frontend process: the kernel deals connections out by their ports."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, method: str, path: str, body: bytes = b"") -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {load_admin_token()}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def workers(self) -> tuple[int, dict[str, dict]]:
        """Give the process that answers, and the workers as it sees them."""
        await self.ask("GET", "/admin/workers")
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split()[0])
        answer = json.loads(await self.reader.readexactly(length))
        return answer["pid"], {worker["name"]: worker for worker in answer["workers"]}

    async def begin(self, prompt: str) -> None:
        """Begin an answer that takes long, and read its first bytes."""
        body = {
            "model": "penstock-demo",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 1000,
            "stream": True,
            "ignore_eos": True,
        }
        await self.ask("POST", "/v1/chat/completions", json.dumps(body).encode())
        await self.reader.readuntil(b"data: ")

    def close(self) -> None:
        self.writer.close()


async def connections(site) -> dict[int, FrontendConnection]:
    """Connect until both processes have been met; give a connection to each, by its pid."""
    host, port = site.url.removeprefix("http://").split(":")
    found: dict[int, FrontendConnection] = {}
    while len(found) < 2:
        connection = FrontendConnection(*await asyncio.open_connection(host, int(port)))
        pid, workers = await connection.workers()
        if pid in found or len(workers) < len(WORKERS):
            connection.close()
        else:
            found[pid] = connection
    return found


def of_peers(workers: dict[str, dict], name: str) -> int:
    return sum((worker["load"] or {})[name] for worker in workers.values())


def test_a_frontend_sees_its_peers_requests_and_they_go_with_its_peer(deploy):
    async def scenario(site):
        met = await connections(site)
        (mine, my_connection), (theirs, their_connection) = met.items()

        async def sees(connection, **figures):
            _, workers = await connection.workers()
            return all(of_peers(workers, f"peer_{name}") == value for name, value in figures.items())

        assert await sees(my_connection, requests=0)
        host, port = site.url.removeprefix("http://").split(":")
        streams = []
        while len(streams) < STREAMS:
            connection = FrontendConnection(*await asyncio.open_connection(host, int(port)))
            pid, _ = await connection.workers()
            if pid == theirs:
                await connection.begin(f"Tell me of river {len(streams)}. " * 20)
                streams.append(connection)
            else:
                connection.close()
        await site.until(lambda: sees(my_connection, requests=STREAMS, arrivals=STREAMS))
        assert await sees(their_connection, requests=0, arrivals=0)
        _, workers = await my_connection.workers()
        assert [workers[name]["load"]["peers"] for name in WORKERS] == [1, 1]
        assert not any(workers[name]["open_requests"] for name in WORKERS), "none of them are its own"

        psutil.Process(theirs).kill()
        await site.until(lambda: sees(my_connection, requests=0, prefill_tokens=0))
        for connection in (*streams, my_connection, their_connection):
            connection.close()
        assert (await site.tell("Are you still there?", max_tokens=4))[1].completion_tokens == 4
        pids = site.deployment.pids().values()
        assert mine in pids
        assert theirs not in pids

    deploy(scenario, workers=2, frontends=2)


def test_a_frontend_that_is_started_again_knows_the_workers_before_it_answers(deploy):
    async def scenario(site):
        met = await connections(site)
        for connection in met.values():
            connection.close()
        psutil.Process(min(met)).kill()
        host, port = site.url.removeprefix("http://").split(":")
        seen = set(met)
        while seen == set(met):
            try:
                connection = FrontendConnection(*await asyncio.open_connection(host, int(port)))
                pid, workers = await connection.workers()
            except (ConnectionError, asyncio.IncompleteReadError):  # it went to the one that was killed
                continue
            connection.close()
            seen.add(pid)
            assert {name: worker["condition"] for name, worker in workers.items()} == dict.fromkeys(
                WORKERS, "ready"
            )

    deploy(scenario, workers=2, frontends=2)
