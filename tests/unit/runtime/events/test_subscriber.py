import asyncio
import random
from itertools import pairwise

from penstock.core.types.events import BlockStored, EventBatch, EventPosition, EventSnapshot
from penstock.core.wire import pack_hashes, unpack_hashes
from penstock.runtime.config import EventConfig
from penstock.runtime.events.subscriber import EventSubscriber
from penstock.sim.loop.loop import run_virtual

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

    def __init__(self, config=CONFIG, seed=1):
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

    def subscribe(self, after_sequence, _holder):
        self.asked.append((round(asyncio.get_running_loop().time(), 6), after_sequence))

    def applied(self, worker_id, events):
        assert worker_id == 7
        self.blocks += [h for event in events for h in unpack_hashes(event.block_hashes).tolist()]

    def replaced(self, worker_id, part):
        if part.chunk == 0:
            self.blocks = []
        self.applied(worker_id, part.events)


def run_scenario(scenario):
    async def main():
        return await scenario()

    return run_virtual(main())


def test_it_asks_for_a_snapshot_first_and_follows_in_order():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        assert subscriber.asked == [(0, None)]
        assert not subscriber.synced
        subscriber.push(snapshot(3, 1, 2))
        assert subscriber.synced
        subscriber.push(batch(4))
        subscriber.push(batch(5))
        assert subscriber.blocks == [1, 2, 4, 5]
        assert subscriber.sequence == 5
        await asyncio.sleep(100)
        assert len(subscriber.asked) == 1
        assert subscriber.resyncs == 0

    run_scenario(scenario)


def test_what_came_already_is_ignored():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.push(snapshot(3, 1))
        for message in (batch(2), batch(3), snapshot(3, 9), snapshot(2, 9, chunk=1), batch(4), batch(4)):
            subscriber.push(message)
        assert subscriber.blocks == [1, 4]
        assert subscriber.faults == ["repeated"] * 5
        assert subscriber.synced
        await asyncio.sleep(100)
        assert len(subscriber.asked) == 1

    run_scenario(scenario)


def test_a_gap_is_asked_for_once_after_a_jitter():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.push(snapshot(3))
        for sequence in (6, 7, 8):
            subscriber.push(batch(sequence))
        assert not subscriber.synced
        assert subscriber.blocks == []
        assert subscriber.resyncs == 1
        assert subscriber.faults == ["gap"], "once for all that it makes it ask for"
        await asyncio.sleep(0.1)
        ((_, first), (when_s, second)) = subscriber.asked
        assert (first, second) == (None, 3)
        assert 0 < when_s < 0.1
        subscriber.push(batch(4))
        assert not subscriber.synced
        subscriber.push(batch(5))
        assert subscriber.synced, "the others came before"
        for sequence in (6, 7, 8, 9):
            subscriber.push(batch(sequence))
        assert subscriber.synced
        assert subscriber.blocks == [4, 5, 6, 7, 8, 9]

    run_scenario(scenario)


def test_only_so_many_batches_wait_for_those_before_them():
    async def scenario():
        subscriber = Recorder(CONFIG.model_copy(update={"early_batches_max": 2}))
        subscriber.start()
        subscriber.push(snapshot(3))
        for sequence in (5, 6, 7, 4):
            subscriber.push(batch(sequence))
        assert subscriber.sequence == 6
        assert not subscriber.synced
        await asyncio.sleep(0.1)
        assert [after for _, after in subscriber.asked] == [None, 6]

    run_scenario(scenario)


def test_batches_that_come_during_a_snapshot_follow_it_and_missing_ones_are_asked_for():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.push(snapshot(5, 1, last=False))
        for sequence in (4, 6, 7, 9):
            subscriber.push(batch(sequence))
        assert subscriber.blocks == [1]
        subscriber.push(snapshot(5, 2, chunk=1))
        assert subscriber.blocks == [1, 2, 6, 7]
        assert [after for _, after in subscriber.asked] == [None, 7]
        subscriber.push(batch(8))
        assert subscriber.blocks == [1, 2, 6, 7, 8, 9]
        assert subscriber.synced

    run_scenario(scenario)


def test_a_position_beyond_what_came_is_a_gap_and_others_are_none():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.push(snapshot(3))
        subscriber.push(EventPosition(sequence=3))
        assert subscriber.synced
        subscriber.push(EventPosition(sequence=5))
        assert not subscriber.synced
        await asyncio.sleep(0.1)
        assert [after for _, after in subscriber.asked] == [None, 3]
        subscriber.push(batch(4))
        assert not subscriber.synced
        subscriber.push(batch(5))
        assert subscriber.synced
        assert subscriber.faults == ["gap"]

    run_scenario(scenario)


def test_a_single_missing_batch_is_a_gap():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.push(snapshot(3))
        subscriber.push(batch(5))
        await asyncio.sleep(0.1)
        assert [after for _, after in subscriber.asked] == [None, 3]

    run_scenario(scenario)


def test_in_doubt_it_asks_for_the_whole_and_goes_on_meanwhile():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.push(snapshot(3, 1))
        assert subscriber.doubt()
        assert not subscriber.doubt()
        subscriber.push(batch(4))
        assert (subscriber.blocks, subscriber.synced, subscriber.resyncs) == ([1, 4], False, 1)
        await asyncio.sleep(0.1)
        assert [after for _, after in subscriber.asked] == [None, None]
        subscriber.push(snapshot(4, 9))
        assert (subscriber.blocks, subscriber.synced, subscriber.faults) == ([9], True, [])
        subscriber.push(snapshot(4, 8))
        assert (subscriber.blocks, subscriber.faults) == ([9], ["repeated"])

    run_scenario(scenario)


def test_whoever_is_doubted_again_and_again_is_asked_ever_more_rarely_and_a_gap_does_not_wait_for_that():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.push(snapshot(0))
        for sequence in range(1, 200):
            subscriber.push(batch(sequence))
            subscriber.doubt()
            asked = len(subscriber.asked)
            await asyncio.sleep(0.5)
            if len(subscriber.asked) > asked:
                subscriber.push(snapshot(sequence, 1))
        times = [when_s for when_s, _ in subscriber.asked]
        assert 15 < len(times) < 50, "of 200; the longest pause is 8 s"
        subscriber.push(snapshot(199))
        subscriber.doubt()
        subscriber.push(batch(205))
        await asyncio.sleep(0.1)
        assert len(subscriber.asked) == len(times) + 1
        assert subscriber.asked[-1][1] is None, "the whole has what is missing"

    run_scenario(scenario)


def test_jitter_differs_between_routers_and_repeats_with_the_seed():
    async def scenario(seed):
        subscriber = Recorder(seed=seed)
        subscriber.start()
        subscriber.push(snapshot(3))
        subscriber.push(batch(9))
        await asyncio.sleep(1)
        return subscriber.asked[1][0]

    times = [run_scenario(lambda seed=seed: scenario(seed)) for seed in (1, 2, 3, 1)]
    assert len(set(times)) == 3
    assert times[0] == times[3]


def test_without_an_answer_it_asks_ever_more_rarely():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        await asyncio.sleep(60)
        times = [when_s for when_s, _ in subscriber.asked]
        waits = [later - sooner for sooner, later in pairwise(times)]
        for wait_s, longest_s in zip(waits, [1, 2, 4, 8, 8, 8, 8], strict=False):
            assert longest_s / 2 <= wait_s <= longest_s
        subscriber.push(snapshot(1, 5))
        asked = len(subscriber.asked)
        await asyncio.sleep(60)
        assert len(subscriber.asked) == asked

    run_scenario(scenario)


def test_a_snapshot_counts_only_when_whole():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.push(snapshot(3, 1, chunk=0, last=False))
        subscriber.push(snapshot(3, 2, chunk=1, last=False))
        assert subscriber.blocks == [1, 2], "each part is applied when it comes"
        assert subscriber.sequence is None
        assert not subscriber.synced
        subscriber.push(snapshot(3, 3, chunk=2))
        assert subscriber.sequence == 3
        assert subscriber.blocks == [1, 2, 3]
        assert subscriber.synced

    run_scenario(scenario)


def test_a_snapshot_with_a_missing_chunk_is_asked_for_again():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.push(snapshot(3, 1, chunk=0, last=False))
        subscriber.push(snapshot(3, 3, chunk=2))
        assert subscriber.blocks == [1]
        assert not subscriber.synced
        await asyncio.sleep(20)
        assert len(subscriber.asked) > 1
        assert {after for _, after in subscriber.asked} == {None}
        subscriber.push(snapshot(4, 1, chunk=0, last=False))
        subscriber.push(snapshot(5, 7, chunk=0, last=False))
        subscriber.push(snapshot(5, 8, chunk=1))
        assert subscriber.blocks == [7, 8]

    run_scenario(scenario)


def test_while_a_long_snapshot_arrives_it_does_not_ask_again():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        for chunk in range(10):
            subscriber.push(snapshot(3, chunk, chunk=chunk, last=chunk == 9))
            await asyncio.sleep(2)
        assert len(subscriber.asked) == 1
        assert subscriber.synced

    run_scenario(scenario)


def test_a_snapshot_without_end_is_refused():
    async def scenario():
        subscriber = Recorder(EventConfig(snapshot_hashes_max=5))
        subscriber.start()
        for chunk in range(100):
            subscriber.push(snapshot(3, 1, 2, chunk=chunk, last=False))
            assert len(subscriber.blocks) <= 5
        assert not subscriber.synced

    run_scenario(scenario)


def test_batches_during_a_snapshot_are_not_lost():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.push(snapshot(3, 1))
        subscriber.push(batch(5))
        subscriber.push(snapshot(6, 1, chunk=0, last=False))
        subscriber.push(batch(4))
        assert subscriber.blocks == [1], "it is in the snapshot"
        subscriber.push(snapshot(6, 2, chunk=1))
        subscriber.push(batch(7))
        assert subscriber.blocks == [1, 2, 7]
        assert subscriber.synced

    run_scenario(scenario)


def test_once_closed_it_neither_asks_nor_applies():
    async def scenario():
        subscriber = Recorder()
        subscriber.start()
        subscriber.close()
        subscriber.close()
        subscriber.push(snapshot(3, 1))
        subscriber.push(batch(9))
        await asyncio.sleep(100)
        assert subscriber.asked == [(0, None)]
        assert subscriber.blocks == []

    run_scenario(scenario)
