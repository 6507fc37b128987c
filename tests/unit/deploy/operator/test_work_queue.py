"""The work queue: no name twice, pauses that double, and news that end a pause."""

import asyncio
import random

import pytest

from penstock.deploy.operator.operator import WorkQueue

pytestmark = pytest.mark.virtual


def queue():
    return WorkQueue(random.Random(1), pause_s=1.0, pause_s_max=10.0)


async def taken(work):
    """Take a name; returns it and the seconds that it took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    return await work.take(), loop.time() - began_s


async def test_a_name_waits_once():
    work = queue()
    for name in ("a", "b", "a"):
        work.add(name)
    assert [await work.take(), await work.take()] == ["a", "b"]
    asyncio.get_running_loop().call_later(5, work.add, "c")
    assert await taken(work) == ("c", 5)
    work.close()


async def test_pauses_double_up_to_their_bound_and_begin_anew_after_success():
    work = queue()
    for longest_s in (1, 2, 4, 8, 10, 10):
        work.failed("a")
        name, took_s = await taken(work)
        assert name == "a"
        assert longest_s / 2 <= took_s <= longest_s
    work.done("a")
    work.failed("a")
    assert (await taken(work))[1] <= 1
    work.close()


async def test_news_end_a_pause():
    work = queue()
    for _ in range(5):
        work.failed("a")
    work.add("a")
    assert await taken(work) == ("a", 0)
    asyncio.get_running_loop().call_later(20, work.add, "b")
    assert await work.take() == "b", "the pause of a has ended with the news"
    work.close()


async def test_work_is_done_again_after_its_time():
    work = queue()
    work.done("a", again_s=30)
    assert await taken(work) == ("a", 30)
    work.close()
