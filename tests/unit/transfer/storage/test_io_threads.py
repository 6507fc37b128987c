"""Turns, errors and cancellations of jobs on threads."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from penstock.core.errors import TransferError
from penstock.testing.loop import run_async
from penstock.transfer.storage.io_threads import Bounce, IoThreads


@pytest.fixture
def threads() -> Iterator[IoThreads]:
    pool = IoThreads(2, 4096, "test")
    yield pool
    pool.close()


def test_every_step_is_done_once(threads: IoThreads) -> None:
    done: list[int] = []

    async def main() -> None:
        await threads.finish(threads.start(lambda index, _: done.append(index), 100))
        await threads.finish(threads.start(lambda index, _: done.append(index), 0))

    run_async(main())
    assert sorted(done) == list(range(100))


def test_a_short_job_does_not_wait_for_a_long_one() -> None:
    threads = IoThreads(1, 4096, "test")
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def long(index: int, _: Bounce) -> None:
        begun.set()
        go_on.wait()
        order.append("long")

    async def main() -> None:
        first = threads.start(long, 50)
        await asyncio.to_thread(begun.wait)
        second = threads.start(lambda _index, _bounce: order.append("short"), 2)
        go_on.set()
        await threads.finish(second)
        await threads.finish(first)

    run_async(main())
    threads.close()
    assert order[:4] == ["long", "short", "long", "short"] or order[:4] == ["long", "long", "short", "long"]
    assert order.count("long") == 50


def test_an_error_ends_the_job(threads: IoThreads) -> None:
    done: list[int] = []

    def fail(index: int, _: Bounce) -> None:
        done.append(index)
        raise TransferError(f"step {index}")

    async def main() -> None:
        with pytest.raises(TransferError, match="step"):
            await threads.finish(threads.start(fail, 1000))

    run_async(main())
    assert len(done) <= 4


def test_a_cancellation_waits_for_the_thread_that_is_at_it(threads: IoThreads) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended: list[int] = []

    def slow(index: int, _: Bounce) -> None:
        begun.set()
        go_on.wait()
        ended.append(index)

    async def main() -> None:
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

    run_async(main())


def test_bounces_are_aligned() -> None:
    bounce = Bounce(8192)
    assert bounce.address % 4096 == 0
    assert len(bounce.view) == 8192
