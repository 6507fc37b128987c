"""Requests that wait for one load: what each gets, when one leaves, and when the load fails."""

import numpy as np

from penstock.core.hashing import block_hashes
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool
from tests.support.held_tier import HeldTier
from tests.support.manual_clock import ManualClock

SIZE = 4
TOKENS = np.arange(10 * SIZE, dtype=np.int32)
HASHES = block_hashes(TOKENS, SIZE)


class Stage:
    """A tier with all ten blocks, in chunks of two, and requests that hold what they are given."""

    def __init__(self, *, seconds_per_block=0.0, kept=10):
        self.clock = ManualClock()
        self.tier = HeldTier(HASHES[:kept, 0].tolist(), seconds_per_block)
        self.tier.chunk_blocks = 2
        self.pool = BlockPool(100, SIZE)
        self.kv = KvManager(self.pool, [self.tier], lambda: None, clock=self.clock)
        self.held = {}
        self.came = {}
        self.over = []

    def begin(self, name, hashes=HASHES):
        self.held[name] = self.kv.begin(name, self.kv.choose_runs(hashes, [], 41))
        self.came[name] = 0

    def take(self):
        for name, block_ids, is_over in self.kv.take_arrived():
            start = self.came[name]
            self.held[name][start : start + len(block_ids)] = block_ids
            self.came[name] += len(block_ids)
            if is_over:
                self.over.append(name)
        return dict(self.came)

    def leave(self, name):
        self.kv.cancel(name)
        self.pool.release(self.held.pop(name))

    def end(self, count=None):
        """End the oldest load of the tier that is under way."""
        self.tier.loads.pop(0).end(count)

    def check_free(self):
        for name in list(self.held):
            self.leave(name)
        assert (self.pool.num_available, self.kv.holders().total()) == (100, 0)


def test_one_load_serves_all_who_wait_for_it():
    stage = Stage()
    for name in "abc":
        stage.begin(name)
    assert len(stage.tier.loads) == 2, "two chunks of one load"
    stage.end()
    assert stage.take() == {"a": 2, "b": 2, "c": 2}
    assert stage.held["a"][:2] == stage.held["b"][:2] == stage.held["c"][:2]
    assert stage.held["a"][2:] != stage.held["b"][2:], "each has blocks of its own for what may not come"
    assert stage.pool.num_active == 3 * 8 + 2
    while stage.tier.loads:
        stage.end()
    assert stage.take() == {"a": 10, "b": 10, "c": 10}
    assert stage.over == ["a", "b", "c"]
    assert (stage.kv.counts[0].loads, stage.kv.counts[0].loaded_blocks) == (1, 10)
    assert stage.pool.num_active == 10
    stage.check_free()


def test_a_request_preempted_while_its_load_is_under_way_waits_for_it_again():
    stage = Stage()
    stage.begin("a")
    stage.begin("b")
    stage.end()
    stage.leave("a")  # before it was told of the first chunk
    stage.begin("a")
    assert len(stage.tier.loads) == 2, "the load goes on for the other, and serves both"
    while stage.tier.loads:
        stage.end()
    assert stage.take() == {"a": 10, "b": 10}
    assert stage.held["a"] == stage.held["b"]
    assert stage.kv.counts[0].loads == 1
    stage.check_free()


def test_a_load_ends_once_the_last_who_wait_have_what_they_need_of_it():
    stage = Stage()
    stage.begin("long")
    stage.begin("short", HASHES[:3])
    stage.leave("long")
    stage.end()
    assert not any(load.is_cancelled for load in stage.tier.loads), "half of the next chunk is needed"
    stage.end()
    assert stage.take()["short"] == 3
    assert stage.over == ["short"]
    assert [load.is_cancelled for load in stage.tier.loads] == [True, True]
    stage.begin("other")
    assert len(stage.tier.loads) == 4, "a load of its own"
    stage.end(0)
    stage.end(0)
    while stage.tier.loads:
        stage.end()
    assert stage.take()["other"] == 10
    stage.check_free()


def test_each_computes_what_a_load_did_not_bring_in_blocks_of_its_own():
    stage = Stage()
    for name in "ab":
        stage.begin(name)
    stage.end()
    stage.end(1)
    while stage.tier.loads:
        stage.end()  # behind what is missing: of no use
    assert stage.take() == {"a": 3, "b": 3}
    assert stage.over == ["a", "b"]
    own = [set(stage.held[name][3:]) for name in "ab"]
    assert own[0].isdisjoint(own[1])
    assert stage.kv.counts[0].missing_blocks == 7, "of one load"
    stage.check_free()


def test_a_load_that_is_late_is_given_up_for_all():
    stage = Stage()
    for name in "ab":
        stage.begin(name)
    stage.end()
    stage.clock.advance(1.0)
    assert all(load.is_cancelled for load in stage.tier.loads)
    while stage.tier.loads:
        stage.end(0)
    assert stage.take() == {"a": 2, "b": 2}
    assert stage.over == ["a", "b"]
    assert stage.kv.counts[0].late_loads == 1
    stage.check_free()


def test_a_shorter_prompt_and_one_that_parts_end_with_what_they_share():
    stage = Stage()
    tokens = TOKENS.copy()
    tokens[5 * SIZE :] = 99
    other = block_hashes(tokens, SIZE)
    stage.tier.keys.update(other[:, 0].tolist())
    stage.begin("whole")
    stage.begin("short", HASHES[:3])
    stage.begin("parts", other)
    while stage.tier.loads:
        stage.end()
        stage.take()
    assert stage.over[0] == "short"
    assert stage.came == {"whole": 10, "short": 3, "parts": 10}
    assert stage.held["parts"][:5] == stage.held["whole"][:5]
    assert set(stage.held["parts"][5:]).isdisjoint(stage.held["whole"])
    stage.check_free()


def test_what_is_under_way_costs_a_second_request_nothing():
    """Loading takes as long as computing but for the first request's blocks, which come in any case."""
    stage = Stage(seconds_per_block=0.5)
    stage.tier.chunk_blocks = 1000
    stage.kv.prefill.measure(100, 10.0)  # 0.4 s a block
    assert stage.kv.choose_runs(HASHES, [], 41) == [], "computing is sooner"
    stage.kv.begin("a", stage.kv.choose_runs(HASHES, [], 41, ahead=[(1000, 0)]))
    assert [run.num_blocks for run in stage.kv.choose_runs(HASHES, [], 41)] == [10]
