"""Requests with common prefixes that wait for one load from a tier, under the life of the tiered machine, and planted bugs.

A request has blocks of its own until the load's blocks take their place: a block that was not replaced, was released too early,
or was loaded for another prefix shows as KV of another prefix.
"""

from dataclasses import replace

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from penstock.core.hashing import block_hashes
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.kv.loader import Arrival, Loader, SharedLoad
from penstock.kv.manager import KvManager
from tests.properties.engine.test_scheduler_machine import (
    BLOCK_SIZE,
    EOS,
    LIMITS,
    LONG_LIVES,
    VOCAB,
    check_that_a_bug_is_found,
    configs,
)
from tests.properties.engine.test_tiered_scheduler_machine import (
    CellTier,
    TieredSchedulerMachine,
    Timers,
    keys,
)

NUM_BLOCKS = 24
TEXTS = [[(family + 7 * index) % VOCAB for index in range(28)] for family in range(2)]


class SharedLoadsMachine(TieredSchedulerMachine):
    @initialize(config=configs, prefetched=st.sampled_from([0, 1, 16]), by_chunk=st.booleans())
    def start(self, config, prefetched, *, by_chunk):
        self.config = config = config.model_copy(
            update={"prefetched_requests": prefetched, "max_waiting_requests": 12}
        )
        pool = self.make_pool(NUM_BLOCKS)
        self.tier = CellTier(self.cells)
        self.tier.num_blocks = 30
        for text in TEXTS:
            self.fill_tier(text)
        self.timers = Timers()
        self.stepped = {}
        self.joined = 0
        self.kv = KvManager(pool, [self.tier], lambda: None, clock=self.timers, by_chunk=by_chunk)
        self.scheduler = Scheduler(
            pool, replace(LIMITS, kv_tokens=NUM_BLOCKS * BLOCK_SIZE), config, eos_token_ids=[EOS], kv=self.kv
        )

    def fill_tier(self, text):
        hashes = block_hashes(text, BLOCK_SIZE)
        for number, key in enumerate(keys(hashes)):
            start = number * BLOCK_SIZE
            digests = [hash(tuple(text[: end + 1])) for end in range(start, start + BLOCK_SIZE)]
            self.tier.kept[key] = digests
        lows = hashes[:, 0].tolist()
        self.parents.update(zip(lows, [None, *lows], strict=False))

    @rule(
        text=st.sampled_from(TEXTS),
        lengths=st.lists(st.integers(9, 28), min_size=2, max_size=4),
        parts_at=st.integers(8, 28),
    )
    def submit_crowd(self, text, lengths, parts_at):
        """Submit requests about one text, the last of which parts from it."""
        for index, length in enumerate(lengths):
            prompt = text[:length]
            if index == len(lengths) - 1:
                prompt[parts_at:] = [1] * len(prompt[parts_at:])
            self.num_submitted += 1
            sampling = SamplingParams(max_tokens=2)
            request_id = f"r{self.num_submitted}"
            request = Request(
                request_id=request_id, model="m", token_ids=pack_tokens(prompt), sampling=sampling
            )
            self.submit_one(request, prompt)
        self.begin_step_if_idle()

    def begin_step_if_idle(self):
        if self.plan is None:
            self.begin_step()
        self.joined += sum(len(load.waiters) > 1 for load in self.kv._loader._loads.all())

    def teardown(self):
        super().teardown()
        if hasattr(self, "joined"):
            self.kv._loader._loads.check_idle()
            event("waited for one load" if self.joined else "each for itself")


SharedLoadsMachine.TestCase.settings = LONG_LIVES
TestSharedLoadsMachine = SharedLoadsMachine.TestCase


def keeping_own_blocks(self):
    changed, self._changed = self._changed, {}
    arrived = []
    for prefix in changed:
        if prefix.is_over:
            del self._wanted[prefix.request_id]
        come, prefix.ready = prefix.ready, []
        self._unhold(come)
        self._pool.release(come)
        own = prefix.targets[prefix.arrived - len(come) : prefix.arrived]
        arrived.append(Arrival(prefix.request_id, own, is_over=prefix.is_over))
    return arrived


def ending_for_the_first_alone(self, load, block_tokens, work):
    self._count(load, work, block_tokens)
    for prefix in list(self._loads.end(load).values())[:1]:
        self._deliver(work, prefix, is_over=True)
    self._unhold(work.targets)
    self._pool.release(work.targets)
    self._on_change()


def releasing_before_others_have_taken(self, load, block_tokens, work):
    self._count(load, work, block_tokens)
    waiting = self._loads.end(load).values()
    self._unhold(work.targets)
    self._pool.release(work.targets)
    for prefix in waiting:
        self._deliver(work, prefix, is_over=True)
    self._on_change()


def bringing_whatever_comes_there(self, hashes, num_before):
    start = num_before - self.num_before
    return min(len(hashes), len(self.hashes) - start) if self.waiters and 0 <= start < len(self.hashes) else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Loader, "take_arrived", keeping_own_blocks),
        (Loader, "_on_done", ending_for_the_first_alone),
        (Loader, "_on_done", releasing_before_others_have_taken),
        (SharedLoad, "count_brought", bringing_whatever_comes_there),
    ],
)
def test_a_planted_bug_is_found(monkeypatch, owner, name, bug):
    monkeypatch.setattr(owner, name, bug)
    check_that_a_bug_is_found(SharedLoadsMachine)
