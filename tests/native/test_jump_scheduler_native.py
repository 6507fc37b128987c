"""The jump engine's scheduler under random requests, aborts, pins and loads: each request gets all its tokens, once.

`tests/sim/engine/test_jump_engine.py` compares it with the exact engine.
"""

import numpy as np
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.errors import Overloaded, RequestError
from penstock.core.ids import RequestId
from penstock.core.native import native
from penstock.core.types.events import Tier
from penstock.core.types.instances import Role
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.core.wire import PackedHashes, PackedTokens, unpack_tokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool
from penstock.sim.engine_timing import TimedTier
from penstock.sim.scheduler import JumpScheduler
from penstock.sim.workload import SimPrompt

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")
BLOCK_SIZE = 4
SHARED = np.array([7, 8, 9], dtype=np.uint64)
"""Units of two tokens, so that a block and a half is the same in all prompts that begin with it."""


class HeldLoad:
    def __init__(self, tier, sources, done):
        self.tier, self.sources, self.done = tier, sources, done

    def cancel(self, *, is_late=False):
        if self in self.tier.loads:
            event("cancelled")
            self.tier.end(self, 0)


class HeldTier:
    """A tier whose loads end when the test says so."""

    num_corrupt = 0
    shared = None
    offload = TimedTier.offload
    offload_room = TimedTier.offload_room
    chunk_blocks = TimedTier.chunk_blocks
    start = TimedTier.start
    take_events = TimedTier.take_events

    def __init__(self, tier, num_blocks, loads):
        self.tier, self.num_blocks, self.loads = tier, num_blocks, loads
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, tier=tier)

    def locate(self, block_hashes):
        return len(self.pool.match(block_hashes))

    def load_s(self, num_blocks):
        return 0.0

    def load(self, block_hashes, targets, done):
        event(f"loaded from {self.tier}")
        sources = self.pool.match(block_hashes)
        assert len(sources) >= len(targets)
        self.pool.acquire(sources)
        load = HeldLoad(self, sources, done)
        self.loads.append(load)
        return load

    def end(self, load, arrived):
        self.loads.remove(load)
        self.pool.release(load.sources)
        load.done(arrived)


class Stopped:
    """A clock that stands still."""

    def time(self):
        return 0.0

    def call_later(self, _seconds, _call):
        return self

    def cancel(self):
        pass


class Expected:
    """Output positions that a request has yet to get."""

    def __init__(self, begin, end, prompt):
        self.begin = begin
        self.end = end
        self.prompt = prompt
        self.is_fresh = True


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are aborted and run, in jumps that are cut anywhere."""

    @initialize(
        num_blocks=st.integers(3, 5) | st.integers(3, 9),
        max_batch_tokens=st.integers(2, 12),
        prompts_at_once=st.integers(1, 2),
        order=st.sampled_from(["fcfs", "shortest", "shortest", None]),
        ageing=st.sampled_from([0.1, 0.7]),
        lower=st.sampled_from([(), (4,), (16,), (16,), (6, 20), (6, 20)]),
    )
    def begin(self, num_blocks, max_batch_tokens, prompts_at_once, order, ageing, lower):
        self.config = SchedulerConfig(
            max_batch_tokens=max_batch_tokens,
            max_prompt_tokens=max(max_batch_tokens // prompts_at_once, 1),
            max_running_requests=min(max_batch_tokens, 3),
            max_waiting_requests=3,
            order=order,
            ageing=ageing,
        )
        self.streams = {}
        self.expected = {}
        self.numbers = 0
        self.loads = []
        self.context_length = num_blocks * BLOCK_SIZE
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        tiers = [HeldTier(*each, self.loads) for each in zip((Tier.HOST, Tier.DISK), lower, strict=False)]
        self.kv = KvManager(self.pool, tiers, lambda: None, clock=Stopped()) if tiers else None
        self.scheduler = JumpScheduler(
            self.pool, self.context_length, self.config, lambda r: self.streams[r.request_id], self.kv
        )
        self.plan = None
        self.pinned = []

    @rule(
        prompt=st.integers(1, 12) | st.integers(8, 24),
        emitted=st.sampled_from([0, 0, 2]),
        more=st.integers(1, 3) | st.integers(1, 20),
        own=st.integers(0, 2),
    )
    def submit(self, prompt, emitted, more, own):
        self.numbers += 1
        request_id, known = RequestId(f"r{self.numbers}"), prompt + emitted
        stream = self.streams[request_id] = SimPrompt(own, SHARED, unit_tokens=2)
        request = Request(
            request_id=request_id,
            model="m",
            token_ids=PackedTokens(bytes(4 * known)),
            num_emitted=emitted,
            prefill_only=own == 1,
            sampling=SamplingParams(max_tokens=emitted + more),
            block_hashes=PackedHashes(stream.block_hashes(BLOCK_SIZE, 0, known // BLOCK_SIZE).tobytes()),
        )
        waiting = self.scheduler.load().waiting_requests
        try:
            self.scheduler.submit(request)
        except RequestError:
            assert known >= self.context_length
        except Overloaded:
            assert waiting >= self.config.max_waiting_requests  # preempted ones wait too
        else:
            end = min(emitted + more, self.context_length - prompt)
            self.expected[request_id] = Expected(emitted, end, prompt)

    @precondition(lambda self: not self.scheduler.load().running_requests)
    @rule(role=st.sampled_from([Role.AGGREGATED, Role.PREFILL, Role.DECODE]))
    def assume(self, role):
        """Have what waits ordered as workers of a role do, which have let go of what ran."""
        self.scheduler.assume(role)
        self.make_plan()

    @rule(data=st.data())
    def abort(self, data):
        request_id = RequestId(f"r{data.draw(st.integers(0, self.numbers))}")
        self.scheduler.abort(request_id)
        self.expected.pop(request_id, None)

    @rule(shares=st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.0]), min_size=2, max_size=9))
    def run(self, shares):
        """Commit and plan in turns; of each plan a share of its steps is done."""
        for share in shares:
            if self.plan is not None:
                self.commit(1 + round(share * (self.plan.steps - 1)))
            self.make_plan()

    @rule()
    def run_on(self):
        """Commit whole plans while there are any: most requests end."""
        for _ in range(60):
            if self.plan is None:
                break
            self.commit(self.plan.steps)
            self.make_plan()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def arrive(self, data):
        load = data.draw(st.sampled_from(self.loads))
        load.tier.end(load, len(load.sources))
        assert self.scheduler.wants_plan or self.loads  # another tier may still load the rest

    def commit(self, steps):
        step = self.scheduler.commit(steps)
        self.plan = None
        if step is not None:
            self.hear(step)
            assert self.expected.keys() >= set(step.prefilling)

    def make_plan(self):
        plan = self.plan = self.scheduler.plan()
        if plan is not None:
            chunks = plan.chunks or []
            assert plan.steps >= 1
            assert plan.batch + sum(new for new, _ in chunks) <= self.config.max_batch_tokens
            assert all(1 <= new <= self.config.prompt_budget for new, _ in chunks)

    def hear(self, step):
        for delta in step.deltas:
            expected = self.expected[delta.request_id]
            positions = unpack_tokens(delta.token_ids).tolist()
            end = expected.begin + len(positions)
            assert positions == list(range(expected.begin, end))
            assert (delta.cached_tokens is not None) == expected.is_fresh
            assert (delta.cached_tokens or 0) <= expected.prompt
            assert (delta.finish_reason is FinishReason.LENGTH) == (end == expected.end)
            expected.begin, expected.is_fresh = end, False
            if end == expected.end:
                del self.expected[delta.request_id]

    @precondition(lambda self: self.plan is not None and self.plan.steps > 1)
    @rule(data=st.data())
    def tell_so_far(self, data):
        left = self.plan.steps
        steps = data.draw(st.integers(1, left - 1))
        load = self.scheduler.load(steps)
        self.hear(self.scheduler.so_far(self.plan, steps))
        assert self.plan.steps == left - steps
        now = self.scheduler.load()
        assert (now.active_blocks, now.context_tokens, now.steps) == (
            load.active_blocks,
            load.context_tokens,
            load.steps,
        )

    @precondition(lambda self: self.plan is not None)
    @rule(own=st.integers(0, 2), count=st.integers(1, 4), data=st.data())
    def hold(self, own, count, data):
        """Have blocks held for transfers, as an engine does: between two steps."""
        if self.plan.steps > 1:
            self.tell_so_far(data)
        names = SimPrompt(own, SHARED, unit_tokens=2).block_hashes(BLOCK_SIZE, 0, count)
        self.pinned += self.scheduler.pins.pin(names)
        self.pinned += self.scheduler.reserve(count) or []
        self.commit(1)
        self.make_plan()

    @precondition(lambda self: self.pinned)
    @rule()
    def let_go(self):
        self.scheduler.pins.unpin(self.pinned)
        self.pinned = []

    @invariant()
    def agree(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            load = self.scheduler.load()
            assert load.running_requests + load.waiting_requests >= len(self.expected)
            assert load.running_requests <= self.config.max_running_requests

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.commit(1)
        self.scheduler.pins.unpin(self.pinned)
        for _ in range(2000):
            while self.loads:
                self.loads[-1].tier.end(self.loads[-1], len(self.loads[-1].sources))
            self.make_plan()
            if self.plan is not None:
                self.commit(self.plan.steps)
            elif not self.loads:
                break
        assert not self.expected, "all requests end once nothing is held"
        self.scheduler.check()
        assert not self.pool.num_active


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=50)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((0, (0, 0), 4, b"", object()), "tokens"),
        ((0, (2, 1), 4, b"", object()), "tokens"),
        ((0, (1, 1), 4, b"12", object()), "16 bytes"),
    ],
)
def test_refuses_what_no_request_is(arguments, what):
    scheduler = native.JumpScheduler(native.Pool(4), BLOCK_SIZE, 8, 8, 2)
    with pytest.raises(ValueError, match=what):
        scheduler.submit(*arguments)
    assert scheduler.num_waiting == 0


def test_refuses_streams_that_name_other_blocks_than_those_asked_for():
    class Short:
        def block_hashes(self, block_size, start, end):
            return b""

    scheduler = native.JumpScheduler(native.Pool(4), BLOCK_SIZE, 8, 8, 2)
    scheduler.submit(0, (6, 6), 8, b"", Short())
    with pytest.raises(ValueError, match="as many blocks"):
        scheduler.plan()


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("bad", [0, -1])
def test_refuses_bounds_below_one(bad, position):
    bounds = [BLOCK_SIZE, 8, 8, 2]
    bounds[position] = bad
    with pytest.raises(ValueError, match=">= 1"):
        native.JumpScheduler(native.Pool(4), *bounds)


@pytest.mark.parametrize("bad", [0.0, -1.0, 1.5, float("nan")])
def test_refuses_what_no_ageing_is(bad):
    with pytest.raises(ValueError, match="ageing"):
        native.JumpScheduler(native.Pool(4), BLOCK_SIZE, 8, 8, 2).reorder(bad)
