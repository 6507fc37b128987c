"""What waits for a broker: bounded, loads at once, events after a while."""

import asyncio

import pytest

from penstock.core.types.events import EventBatch
from penstock.core.types.load import RankNews, WorkerLoad
from penstock.runtime.events.nats import Outgoing

pytestmark = pytest.mark.virtual


def batch(sequence):
    return EventBatch(sequence=sequence, events=())


async def test_events_wait_for_more_and_a_load_report_ends_the_wait():
    loop = asyncio.get_running_loop()
    outgoing = Outgoing(10, linger_s=1.0, on_dropped=lambda _: None)
    loop.call_at(1.0, outgoing.push_event, 0, batch(1))
    loop.call_at(1.5, outgoing.push_event, 0, batch(2))
    await outgoing.wait()
    assert loop.time() == 2.0
    (news,) = outgoing.take()
    assert [each.sequence for each in news.batches] == [1, 2]
    loop.call_at(3.0, outgoing.push_event, 1, batch(3))
    loop.call_at(3.5, outgoing.push_load, RankNews(rank=0, load=WorkerLoad(steps=1)))
    await outgoing.wait()
    assert loop.time() == 3.5
    first, second = outgoing.take()
    assert (first.rank, first.load, first.batches) == (0, WorkerLoad(steps=1), ())
    assert (second.rank, second.load, second.batches) == (1, None, (batch(3),))
    assert outgoing.take() == ()


async def test_only_the_newest_load_and_at_most_so_many_batches_wait():
    dropped = []
    outgoing = Outgoing(3, linger_s=1.0, on_dropped=dropped.append)
    for number in range(8):
        outgoing.push_event(0, batch(number))
        outgoing.push_load(RankNews(load=WorkerLoad(number=number)))
    (news,) = outgoing.take()
    assert dropped == [3, 3]
    assert [each.sequence for each in news.batches] == [6, 7]
    assert news.load == WorkerLoad(number=7)
    outgoing.push_event(0, batch(9))
    outgoing.drop()
    assert (outgoing.take(), dropped) == ((), [3, 3, 1])
