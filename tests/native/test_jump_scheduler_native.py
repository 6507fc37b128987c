"""The native scheduler of simulated engines beside its Python reference, event by event."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.errors import PenstockError
from penstock.core.ids import RequestId
from penstock.core.native import native
from penstock.core.types.events import Tier
from penstock.core.types.instances import Role
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import PackedHashes, PackedTokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.pool.pool import BlockPool
from penstock.kv.tiers.tiers import TieredPool
from penstock.sim.engine.native_scheduler import NativeScheduler, make_scheduler
from penstock.sim.engine.scheduler import JumpScheduler
from penstock.sim.workload.prompt import Prompt

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")
BLOCK_SIZE = 4
SHARED = np.array([7, 8, 9], dtype=np.uint64)
"""Units of two tokens, so that a block and a half is the same in all prompts that begin with it."""


class SchedulerPair(RuleBasedStateMachine):
    """Requests come, are aborted and run, in jumps that are cut anywhere; both say the same of all of it."""

    @initialize(
        num_blocks=st.integers(3, 9),
        max_batch_tokens=st.integers(2, 12),
        prompts_at_once=st.integers(1, 2),
        order=st.sampled_from(["fcfs", "shortest", "shortest", None]),
        ageing=st.sampled_from([0.1, 0.7]),
    )
    def begin(self, num_blocks, max_batch_tokens, prompts_at_once, order, ageing):
        config = SchedulerConfig(
            max_batch_tokens=max_batch_tokens,
            max_prompt_tokens=max(max_batch_tokens // prompts_at_once, 1),
            max_running_requests=min(max_batch_tokens, 3),
            max_waiting_requests=3,
            order=order,
            ageing=ageing,
        )
        self.streams = {}
        self.numbers = 0
        pools = [BlockPool(num_blocks, BLOCK_SIZE) for _ in range(2)]
        context_length = num_blocks * BLOCK_SIZE
        self.native = NativeScheduler(pools[0], context_length, config, self.stream_of)
        self.reference = JumpScheduler(pools[1], context_length, config, self.stream_of)
        self.plans = None
        self.pinned = []
        self.left = 0
        """Steps of the plan that are not done yet."""

    def stream_of(self, request):
        return self.streams[request.request_id]

    def both(self, method, *arguments):
        answers = []
        for scheduler in (self.native, self.reference):
            try:
                answers.append(getattr(scheduler, method)(*arguments))
            except PenstockError as error:
                answers.append(error.message)
        assert answers[0] == answers[1]
        return answers[0]

    @rule(
        prompt=st.integers(1, 12),
        emitted=st.sampled_from([0, 0, 2]),
        more=st.integers(1, 20),
        own=st.integers(0, 2),
    )
    def submit(self, prompt, emitted, more, own):
        self.numbers += 1
        request_id, known = RequestId(f"r{self.numbers}"), prompt + emitted
        stream = self.streams[request_id] = Prompt(own, SHARED, unit_tokens=2)
        request = Request(
            request_id=request_id,
            model="m",
            token_ids=PackedTokens(bytes(4 * known)),
            num_emitted=emitted,
            prefill_only=own == 1,
            sampling=SamplingParams(max_tokens=emitted + more),
            block_hashes=PackedHashes(stream.block_hashes(BLOCK_SIZE, 0, known // BLOCK_SIZE).tobytes()),
        )
        self.both("submit", request)

    @precondition(lambda self: not self.reference.load().running_requests)
    @rule(role=st.sampled_from([Role.AGGREGATED, Role.PREFILL, Role.DECODE]))
    def assume(self, role):
        """Have what waits ordered as workers of a role do, which have let go of what ran."""
        self.both("assume", role)
        self.plan()

    @rule(data=st.data())
    def abort(self, data):
        self.both("abort", RequestId(f"r{data.draw(st.integers(0, self.numbers))}"))

    @rule(shares=st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.0]), min_size=1, max_size=6))
    def run(self, shares):
        """Commit and plan in turns; of each plan a share of its steps is done."""
        for share in shares:
            if self.plans is not None:
                self.both("commit", 1 + round(share * (self.left - 1)))
            self.plan()

    def plan(self):
        plans = (self.native.plan(), self.reference.plan())
        assert plans[0] == plans[1]
        self.plans, self.left = (plans, plans[0].steps) if plans[0] is not None else (None, 0)

    @precondition(lambda self: self.left > 1)
    @rule(data=st.data())
    def tell_so_far(self, data):
        steps = data.draw(st.integers(1, self.left - 1))
        native, reference = self.plans
        assert self.native.so_far(native, steps) == self.reference.so_far(reference, steps)
        assert native == reference
        self.left = native.steps

    @precondition(lambda self: self.left > 0)
    @rule(own=st.integers(0, 2), count=st.integers(1, 4), data=st.data())
    def hold(self, own, count, data):
        """Have blocks held for transfers, as an engine does: between two steps."""
        if self.left > 1:
            self.tell_so_far(data)
        self.pinned += self.both_pins(
            "pin", Prompt(own, SHARED, unit_tokens=2).block_hashes(BLOCK_SIZE, 0, count)
        )
        self.pinned += self.both("reserve", count) or []
        self.both("commit", 1)
        self.plan()

    @precondition(lambda self: self.pinned)
    @rule()
    def let_go(self):
        self.both_pins("unpin", self.pinned)
        self.pinned = []

    def both_pins(self, method, *arguments):
        answers = [getattr(s.pins, method)(*arguments) for s in (self.native, self.reference)]
        assert answers[0] == answers[1]
        return answers[0]

    @precondition(lambda self: self.left > 1)
    @rule(data=st.data())
    def load_within(self, data):
        self.both("load", data.draw(st.integers(0, self.left - 1)))

    @invariant()
    def agree(self):
        if hasattr(self, "native"):
            assert self.native.wants_plan == self.reference.wants_plan
            self.both("load")
            self.both("check")


TestSchedulerPair = SchedulerPair.TestCase
TestSchedulerPair.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("order", ["fcfs", "shortest", None])
def test_choice_is_native_whatever_the_order_where_no_tiers_are_beneath_the_device(order):
    config = SchedulerConfig(max_batch_tokens=8, max_running_requests=2, order=order)
    pool = BlockPool(4, BLOCK_SIZE)
    assert type(make_scheduler(pool, 16, config, {}.__getitem__, None)) is NativeScheduler
    tiered = TieredPool(pool, [BlockPool(8, BLOCK_SIZE, tier=Tier.HOST)], copier=None)
    assert type(make_scheduler(tiered, 16, config, {}.__getitem__, None)) is JumpScheduler


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


@pytest.mark.parametrize("bad", [0, -1])
def test_refuses_bounds_below_one(bad):
    for position in range(4):
        bounds = [BLOCK_SIZE, 8, 8, 2]
        bounds[position] = bad
        with pytest.raises(ValueError, match=">= 1"):
            native.JumpScheduler(native.Pool(4), *bounds)


@pytest.mark.parametrize("bad", [0.0, -1.0, 1.5, float("nan")])
def test_refuses_what_no_ageing_is(bad):
    with pytest.raises(ValueError, match="ageing"):
        native.JumpScheduler(native.Pool(4), BLOCK_SIZE, 8, 8, 2).reorder(bad)
