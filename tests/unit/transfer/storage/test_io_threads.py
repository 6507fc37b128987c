"""Turns, errors and cancellations of jobs on threads."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from penstock.core.errors import TransferError
from penstock.transfer.storage.io_threads import Bounce, IoThreads


@pytest.fixture
def threads() -> Iterator[IoThreads]:
    pool = IoThreads(2, 4096, "test")
    yield pool
    pool.close()


async def test_a_short_job_does_not_wait_for_a_long_one() -> None:
    threads = IoThreads(1, 4096, "test")
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def long(index: int, _: Bounce) -> None:
        begun.set()
        go_on.wait()
        order.append("long")

    first = threads.start(long, 50)
    await asyncio.to_thread(begun.wait)
    second = threads.start(lambda _index, _bounce: order.append("short"), 2)
    go_on.set()
    await threads.finish(second)
    await threads.finish(first)
    threads.close()
    assert order[:4] == ["long", "short", "long", "short"] or order[:4] == ["long", "long", "short", "long"]
    assert order.count("long") == 50


async def test_an_error_ends_the_job(threads: IoThreads) -> None:
    done: list[int] = []

    def fail(index: int, _: Bounce) -> None:
        done.append(index)
        raise TransferError(f"step {index}")

    with pytest.raises(TransferError, match="step"):
        await threads.finish(threads.start(fail, 1000))
    assert len(done) <= 4


async def test_a_cancellation_waits_for_the_thread_that_is_at_it(threads: IoThreads) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended: list[int] = []

    def slow(index: int, _: Bounce) -> None:
        begun.set()
        go_on.wait()
        ended.append(index)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(threads.finish(threads.start(slow, 1000)))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert 1 <= len(ended) <= 2
