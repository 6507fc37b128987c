"""A cancellation that a client's call swallows is raised nevertheless."""

import asyncio

import pytest

from penstock.runtime.nats.connection import uncancelled
from penstock.testing.loop import run_async


async def swallowing(begun):
    begun.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "as if nothing had happened"


def test_a_swallowed_cancellation_ends_the_task():
    async def scenario():
        begun = asyncio.Event()
        task = asyncio.create_task(uncancelled(swallowing(begun)))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_async(scenario())


def test_a_swallowed_timeout_is_a_timeout():
    async def scenario():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await uncancelled(swallowing(asyncio.Event()))

    run_async(scenario())


def test_the_end_of_one_part_ends_another_that_swallows_it():
    async def scenario():
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

    run_async(scenario())


def test_a_cancellation_that_has_ended_before_is_not_raised_again():
    async def scenario():
        async def fails():
            raise OSError("gone")

        with pytest.raises(ExceptionGroup, match="TaskGroup"):
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
        assert await uncancelled(asyncio.sleep(0, "answer")) == "answer"

    run_async(scenario())


def test_answers_come_through():
    async def scenario():
        assert await uncancelled(asyncio.sleep(0, "answer")) == "answer"

    run_async(scenario())
