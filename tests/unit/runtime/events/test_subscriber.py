"""What a subscriber asks for, when, and how much it keeps; that it ends with the right blocks, the machine of tests/properties shows."""

import asyncio
import random
from itertools import pairwise

import pytest

from penstock.core.types.events import BlockStored, EventBatch, EventSnapshot
from penstock.core.wire import pack_hashes, unpack_hashes
from penstock.runtime.config import EventConfig
from penstock.runtime.events.subscriber import EventSubscriber

pytestmark = pytest.mark.virtual
CONFIG = EventConfig(resync_jitter_s=0.1, resync_timeout_s=1.0, resync_timeout_s_max=8.0)


def stored(*hashes):
    return BlockStored(block_hashes=pack_hashes(hashes), parent_block_hash=None, block_size=16)


def batch(sequence):
    return EventBatch(sequence=sequence, events=(stored(sequence),))


def snapshot(sequence, *hashes, chunk=0, last=True):
    events = (stored(*hashes),) if hashes else ()
    return EventSnapshot(sequence=sequence, chunk=chunk, last=last, events=events)


class Recorder(EventSubscriber):
    """A subscriber with a connection that only notes what is asked of it, and when."""

    worker_id = 7

    def __init__(self, *messages, config=CONFIG, seed=1):
        self.times = []
        self.asked = []
        self.blocks = []
        self.faults = []
        super().__init__(
            self,
            apply=self.applied,
            replace=self.replaced,
            on_fault=self.faults.append,
            rng=random.Random(seed),
            config=config,
        )
        self.start()
        self.told(*messages)

    def told(self, *messages):
        for message in messages:
            self.push(message)

    def subscribe(self, after_sequence, _holder):
        self.times.append(asyncio.get_running_loop().time())
        self.asked.append(after_sequence)

    def applied(self, worker_id, events):
        assert worker_id == 7
        self.blocks += [h for event in events for h in unpack_hashes(event.block_hashes).tolist()]

    def replaced(self, worker_id, part):
        if part.chunk == 0:
            self.blocks = []
        self.applied(worker_id, part.events)


async def test_only_so_many_batches_wait_for_those_before_them():
    config = CONFIG.model_copy(update={"early_batches_max": 2})
    subscriber = Recorder(snapshot(3), *map(batch, (5, 6, 7, 4)), config=config)
    assert (subscriber.sequence, subscriber.synced) == (6, False)
    await asyncio.sleep(0.1)
    assert subscriber.asked == [None, 6]


async def test_batches_that_come_during_a_snapshot_follow_it_and_missing_ones_are_asked_for():
    subscriber = Recorder(snapshot(5, 1, last=False), *map(batch, (4, 6, 7, 9)))
    assert (subscriber.blocks, subscriber.sequence, subscriber.synced) == ([1], None, False)
    subscriber.push(snapshot(5, 2, chunk=1))
    assert subscriber.blocks == [1, 2, 6, 7]
    assert subscriber.asked == [None, 7]
    subscriber.push(batch(8))
    assert (subscriber.blocks, subscriber.synced) == ([1, 2, 6, 7, 8, 9], True)


async def test_in_doubt_it_asks_for_the_whole_and_goes_on_meanwhile():
    subscriber = Recorder(snapshot(3, 1))
    assert subscriber.doubt()
    assert not subscriber.doubt()
    subscriber.push(batch(4))
    assert (subscriber.blocks, subscriber.synced, subscriber.resyncs) == ([1, 4], False, 1)
    await asyncio.sleep(0.1)
    assert subscriber.asked == [None, None]
    subscriber.push(snapshot(4, 9))
    assert (subscriber.blocks, subscriber.synced, subscriber.faults) == ([9], True, [])


async def test_whoever_is_doubted_again_and_again_is_asked_ever_more_rarely_and_a_gap_does_not_wait_for_that():
    subscriber = Recorder(snapshot(0))
    for sequence in range(1, 200):
        subscriber.push(batch(sequence))
        subscriber.doubt()
        asked = len(subscriber.asked)
        await asyncio.sleep(0.5)
        if len(subscriber.asked) > asked:
            subscriber.push(snapshot(sequence, 1))
    count = len(subscriber.asked)
    assert 15 < count < 50, "of 200; the longest pause is 8 s"
    subscriber.push(snapshot(199))
    subscriber.doubt()
    subscriber.push(batch(205))
    await asyncio.sleep(0.1)
    assert subscriber.asked[count:] == [None], "the whole has what is missing"


async def test_without_an_answer_it_asks_ever_more_rarely():
    subscriber = Recorder()
    await asyncio.sleep(60)
    waits = [later - sooner for sooner, later in pairwise(subscriber.times)]
    for wait_s, longest_s in zip(waits, [1, 2, 4, 8, 8, 8, 8], strict=False):
        assert longest_s / 2 <= wait_s <= longest_s
    subscriber.push(snapshot(1, 5))
    asked = len(subscriber.asked)
    await asyncio.sleep(60)
    assert len(subscriber.asked) == asked


async def test_while_a_long_snapshot_arrives_it_does_not_ask_again():
    subscriber = Recorder()
    for chunk in range(10):
        subscriber.push(snapshot(3, chunk, chunk=chunk, last=chunk == 9))
        await asyncio.sleep(2)
    assert (subscriber.asked, subscriber.synced) == ([None], True)


async def test_a_snapshot_without_end_is_refused():
    subscriber = Recorder(config=EventConfig(snapshot_hashes_max=5))
    for chunk in range(100):
        subscriber.push(snapshot(3, 1, 2, chunk=chunk, last=False))
        assert len(subscriber.blocks) <= 5
    assert not subscriber.synced


async def test_once_closed_it_neither_asks_nor_applies():
    subscriber = Recorder()
    subscriber.close()
    subscriber.close()
    subscriber.told(snapshot(3, 1), batch(9))
    await asyncio.sleep(100)
    assert (subscriber.asked, subscriber.blocks) == ([None], [])
