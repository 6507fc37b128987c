"""Prefetches: the next waiting requests hold their prefixes and load what lower tiers have, before their turn comes."""

import numpy as np
import pytest

from penstock.core.hashing import block_hashes
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequences import Sampled, SequenceLimits
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool
from penstock.testing.engines.probe import make_request
from tests.support.held_tier import HeldTier

SIZE = 4
PROMPT = list(range(30))
"""Of 7 blocks that may come from a cache."""
OTHER = [50 + number for number in range(30)]


class Clock:
    def time(self):
        return 0.0

    def call_later(self, _delay, _callback):
        return self

    def cancel(self):
        pass


class Stage:
    """A scheduler with one batch slot, which "runs" holds, over a tier that keeps `PROMPT` and `OTHER`."""

    def __init__(self, *, num_blocks=64, running=5, seconds_per_block=0.0, **config):
        limits = SequenceLimits(
            block_size=SIZE,
            model_context_length=128,
            kv_tokens=num_blocks * SIZE,
            vocab_size=100,
            hash_key=bytes(16),
        )
        kept = [block_hashes(prompt, SIZE, key=bytes(16))[:, 0].tolist() for prompt in (PROMPT, OTHER)]
        self.tier = HeldTier([key for keys in kept for key in keys], seconds_per_block)
        self.pool = BlockPool(num_blocks, SIZE)
        self.kv = KvManager(self.pool, [self.tier], lambda: None, clock=Clock())
        settings = SchedulerConfig(**{"max_batch_tokens": 64, "max_running_requests": 1} | config)
        self.scheduler = Scheduler(self.pool, limits, settings, kv=self.kv)
        self.answers = {}
        self.submit("runs", [99] * running, max_tokens=60)
        self.step()

    def submit(self, name, tokens, max_tokens=1):
        self.scheduler.submit(make_request(name, tokens, max_tokens=max_tokens))

    def step(self):
        """Run one step; returns the requests in it, and how many tokens each computes."""
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is None:
            return {}
        names = self.scheduler.requests_of(plan)
        done = self.scheduler.commit(plan, Sampled(np.where(plan.samples, 1, -1).astype(np.int32)))
        self.answers |= {
            delta.request_id: delta.cached_tokens for delta in done.deltas if delta.cached_tokens is not None
        }
        self.scheduler.check()
        return dict(zip(names, plan.num_new.tolist(), strict=True))

    @property
    def counts(self):
        (counts,) = self.kv.counts
        return counts.prefetched_blocks, counts.wasted_blocks


def test_a_prefix_is_loaded_while_the_batch_is_full():
    stage = Stage()
    stage.submit("a", PROMPT)
    assert stage.step() == {"runs": 1}
    (load,) = stage.tier.loads
    load.end()
    stage.step()
    assert stage.scheduler.load().running_requests == 1
    assert len(stage.pool.match(block_hashes(PROMPT, SIZE, key=bytes(16)))) == 7, "others find it too"
    stage.scheduler.abort("runs")
    assert stage.step() == {"a": 2}, "nothing is left to load"
    assert stage.answers["a"] == 28
    assert stage.counts == (7, 0)
    assert stage.kv.tokens[0] == 28
    assert len(stage.tier.loads) == 1


def test_a_request_whose_turn_comes_first_goes_on_with_its_load():
    stage = Stage()
    stage.submit("a", PROMPT)
    stage.step()
    stage.scheduler.abort("runs")
    assert stage.step() == {}
    load = stage.scheduler.load()
    assert (load.running_requests, load.waiting_requests) == (1, 0)
    assert stage.kv.tokens[0] == 28
    stage.tier.loads[0].end(5)
    assert stage.step() == {"a": 10}
    assert stage.answers["a"] == 20
    assert len(stage.tier.loads) == 1, "blocks that did not arrive are computed"
    assert stage.counts == (7, 0)


def test_an_aborted_request_cancels_its_load_and_frees_its_blocks_once_the_tier_writes_no_more():
    stage = Stage()
    free = stage.pool.num_available
    stage.submit("a", PROMPT)
    stage.step()
    assert stage.pool.num_available == free - 7
    stage.scheduler.abort("a")
    (load,) = stage.tier.loads
    assert load.is_cancelled
    assert stage.pool.num_available == free - 7, "the tier may still write"
    load.end(0)
    assert stage.pool.num_available == free
    assert stage.counts == (7, 7)
    stage.scheduler.check()


@pytest.mark.parametrize(("num_blocks", "loads"), [(19, 2), (18, 1), (11, 1), (10, 0)])
def test_only_what_fits_beside_all_before_it_is_loaded(num_blocks, loads):
    # 2 blocks run and have one more reserved; each prompt takes 8 in all
    stage = Stage(num_blocks=num_blocks, running=6)
    stage.submit("a", PROMPT)
    stage.submit("b", OTHER)
    stage.step()
    assert len(stage.tier.loads) == loads


def test_the_newest_gives_way_when_running_requests_need_the_blocks():
    stage = Stage(num_blocks=20, running=6)
    stage.submit("a", PROMPT)
    stage.submit("b", OTHER)
    stage.step()
    for load in stage.tier.loads:
        load.end()
    while stage.counts[1] == 0:
        assert stage.step() == {"runs": 1}
    assert stage.counts == (14, 7)
    assert stage.scheduler.load().preemptions == 0
    assert len(stage.pool.match(block_hashes(PROMPT, SIZE, key=bytes(16)))) == 7, "the first keeps its own"
