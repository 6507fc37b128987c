"""A reflector's pauses, on virtual time, and the end of a watch whose connection is dead."""

import asyncio
import json
import random
from types import SimpleNamespace

import pytest

from penstock.core.errors import Unavailable
from penstock.runtime.kubernetes import (
    LEASES,
    KubernetesAccess,
    KubernetesClient,
    KubernetesError,
    Listing,
    Pace,
    Reflector,
)
from penstock.sim.loop import run_virtual


class Scripted:
    """An API server whose watches begin, and end at once by `error` or cleanly."""

    def __init__(self, error=None, *, lasts_s=0.0):
        self.error, self.lasts_s = error, lasts_s
        self.lists = self.watches = 0

    async def list(self, _resource, _labels, *, limit=None):
        self.lists += limit is None
        return Listing("1", [])

    async def watch(self, _resource, _labels, _revision, *, seconds):
        self.watches += 1
        yield None
        await asyncio.sleep(self.lasts_s)
        if self.error is not None:
            raise self.error


def follow(client, seconds):
    losses = []
    told = SimpleNamespace(listed=lambda _: None, connected=lambda: None, lost=losses.append)

    async def main():
        pace = Pace(probe_s=1000.0, retry_s=0.5, retry_s_max=10.0)
        reflector = Reflector(client, LEASES, "", told, pace=pace, rng=random.Random(1))
        task = asyncio.create_task(reflector.run())
        await asyncio.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
    return losses


def test_watches_that_end_at_once_are_made_again_after_growing_pauses():
    client = Scripted(lasts_s=0.01)
    assert follow(client, 100.0) == []
    assert 10 <= client.watches <= 30
    assert client.lists == 1


def test_watches_that_are_gone_at_once_are_made_again_after_growing_pauses():
    error = KubernetesError("too old", status=410, reason="Expired")
    client = Scripted(error, lasts_s=0.01)
    losses = follow(client, 100.0)
    assert 10 <= client.watches <= 30
    assert client.lists == client.watches
    assert losses == [error] * (client.watches - 1), "the first is read again at once"


def test_watches_that_end_in_time_follow_each_other_without_a_pause():
    client = Scripted(lasts_s=20.0)
    follow(client, 101.0)
    assert client.watches == 6


def test_an_error_after_a_long_watch_has_the_first_pause():
    client = Scripted(Unavailable("cut"), lasts_s=20.0)
    follow(client, 101.0)
    assert client.watches == 5


async def test_a_watch_of_a_dead_connection_ends_by_the_clients_own_deadline():
    ended = asyncio.Event()

    async def silent(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(bookmark).encode() + b"\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    access = KubernetesAccess(f"http://127.0.0.1:{port}", namespace="default", token="t")
    async with KubernetesClient(access, timeout_s=1.0) as client:
        watch = client.watch(LEASES, "", "1", seconds=0)
        first, bookmark = [event async for event in watch]
        assert first is None
        assert bookmark.object["metadata"]["resourceVersion"] == "7"
    await ended.wait()
    server.close()
    await server.wait_closed()
