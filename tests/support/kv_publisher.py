"""Publishes KV events over ZeroMQ as vLLM and SGLang do."""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine.kv_events.subscriber import PublisherAddress

zmq = pytest.importorskip("zmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")

END = b"\xff" * 8


class KvPublisher:
    """Publishes batches numbered from 0, the latest `keep` batches again on request."""

    def __init__(self, address: PublisherAddress, keep: int = 1000) -> None:
        self.address = address
        self.context = zmq_asyncio.Context()
        self.events = self.context.socket(zmq.PUB)
        self.events.linger = 0
        self.events.sndhwm = 100_000
        self.events.bind(address.endpoint)
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self.next = 0
        self.replays: list[int] = []
        self.skipped: set[int] = set()
        """Batches that the next replay drops, as a ROUTER socket does when its queue is full."""
        self.replayed_at_once = 1 << 30
        """A replay drops what comes after so many batches, and its end."""

    async def serve_replays(self) -> None:
        with self.context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(self.address.replay_endpoint)
            while True:
                client, _, start = await router.recv_multipart()
                self.replays.append(int.from_bytes(start, "big"))
                skipped, self.skipped = self.skipped, set()
                asked = [(number, payload) for number, payload in self.kept if number >= self.replays[-1]]
                for number, payload in asked[: self.replayed_at_once]:
                    if number not in skipped:
                        await router.send_multipart([client, b"", b"kv", number.to_bytes(8, "big"), payload])
                if len(asked) <= self.replayed_at_once:
                    await router.send_multipart([client, b"", b"", END, b""])

    async def send(self, *events: Any, lost: bool = False) -> None:
        await self.send_raw(msgspec.msgpack.encode([self.next * 0.25, events, 0]), lost=lost)

    async def send_raw(self, payload: bytes, *, lost: bool = False) -> None:
        if not lost:
            await self.events.send_multipart([b"kv", self.next.to_bytes(8, "big"), payload])
        self.kept.append((self.next, payload))
        self.next += 1


@asynccontextmanager
async def publishing(
    address: PublisherAddress, keep: int = 1000, kind: type[KvPublisher] = KvPublisher
) -> AsyncIterator[Any]:
    publisher = kind(address, keep)
    async with asyncio.TaskGroup() as tasks:
        replays = tasks.create_task(publisher.serve_replays()) if address.replay_endpoint else None
        try:
            yield publisher
        finally:
            if replays is not None:
                replays.cancel()
                await asyncio.gather(replays, return_exceptions=True)
            publisher.context.destroy(linger=0)


def endpoints(kind: str, folder: Path) -> PublisherAddress:
    """Give free addresses: `ipc` or `tcp`."""
    if kind == "ipc":
        return PublisherAddress(endpoint=f"ipc://{folder}/events", replay_endpoint=f"ipc://{folder}/replay")
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(server.getsockname()[1])
    return PublisherAddress(
        endpoint=f"tcp://127.0.0.1:{ports[0]}", replay_endpoint=f"tcp://127.0.0.1:{ports[1]}"
    )
