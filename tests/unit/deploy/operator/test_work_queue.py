"""The work queue: no name twice, pauses that double, and news that end a pause."""

import asyncio
import random

from penstock.deploy.operator.work_queue import WorkQueue
from penstock.sim.loop.loop import SimLoop
from penstock.testing.loop import run_async


def run(scenario):
    async def main():
        queue = WorkQueue(random.Random(1), pause_s=1.0, pause_s_max=10.0)
        await scenario(queue, asyncio.get_running_loop())
        queue.close()

    run_async(main(), loop_factory=SimLoop)


def test_a_name_waits_once():
    async def scenario(queue, loop):
        for name in ("a", "b", "a"):
            queue.add(name)
        assert [await queue.take(), await queue.take()] == ["a", "b"]
        waiting = loop.time()
        loop.call_later(5, queue.add, "c")
        assert await queue.take() == "c"
        assert loop.time() - waiting == 5

    run(scenario)


def test_pauses_double_up_to_their_bound_and_begin_anew_after_success():
    async def scenario(queue, loop):
        for longest_s in (1, 2, 4, 8, 10, 10):
            queue.failed("a")
            began_s = loop.time()
            assert await queue.take() == "a"
            assert longest_s / 2 <= loop.time() - began_s <= longest_s
        queue.done("a")
        queue.failed("a")
        began_s = loop.time()
        await queue.take()
        assert loop.time() - began_s <= 1

    run(scenario)


def test_news_end_a_pause():
    async def scenario(queue, loop):
        for _ in range(5):
            queue.failed("a")
        queue.add("a")
        began_s = loop.time()
        assert await queue.take() == "a"
        assert loop.time() == began_s
        loop.call_later(20, queue.add, "b")
        assert await queue.take() == "b", "the pause of a has ended with the news"

    run(scenario)


def test_work_is_done_again_after_its_time():
    async def scenario(queue, loop):
        queue.done("a", again_s=30)
        began_s = loop.time()
        assert await queue.take() == "a"
        assert loop.time() - began_s == 30

    run(scenario)
