"""A cancellation that a client's call swallows is raised nevertheless."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.nats import NatsConnection, uncancelled


async def swallowing(begun):
    begun.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "as if nothing had happened"


async def test_a_swallowed_cancellation_ends_the_task():
    begun = asyncio.Event()
    task = asyncio.create_task(uncancelled(swallowing(begun)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_swallowed_timeout_is_a_timeout():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await uncancelled(swallowing(asyncio.Event()))


async def test_the_end_of_one_part_ends_another_that_swallows_it():
    async def fails(begun):
        await begun.wait()
        raise OSError("gone")

    async def both():
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            begun = asyncio.Event()
            group.create_task(uncancelled(swallowing(begun)))
            group.create_task(fails(begun))

    with pytest.raises(ExceptionGroup, match="TaskGroup"):
        await both()


async def test_a_cancellation_that_has_ended_before_is_not_raised_again():
    async def fails():
        raise OSError("gone")

    with pytest.raises(ExceptionGroup, match="TaskGroup"):
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
    assert await uncancelled(asyncio.sleep(0, "answer")) == "answer"


async def test_a_cancellation_while_a_connection_ends_by_an_error_ends_keep():
    connection = NatsConnection(
        ["nats://127.0.0.1:1"], None, needs="", rng=random.Random(1), tls=None, config=DiscoveryConfig()
    )
    ending, may_end = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def connected():
        yield asyncio.get_running_loop().create_future(), None

    async def fails():
        await asyncio.sleep(0)
        raise OSError("gone")

    async def ends_slowly():
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()

    connection.connected = connected
    keeping = asyncio.create_task(connection.keep(lambda _: [ends_slowly(), fails()], on_lost=lambda _: None))
    await ending.wait()
    connection.close()
    keeping.cancel()
    may_end.set()
    done, _ = await asyncio.wait([keeping], timeout=60.0)
    for _ in range(9):
        keeping.cancel()
        await asyncio.sleep(0)
    assert done
