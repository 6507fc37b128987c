"""Prompts of all lengths at a scheduler that computes the shortest first: short ones overtake, and nobody is overtaken for ever."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.ids import RequestId
from penstock.core.types.instances import Role
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequences import Sampled, SequenceLimits
from penstock.kv.pool import BlockPool

BLOCK_SIZE = 4
NUM_BLOCKS = 4000
LIMITS = SequenceLimits(
    block_size=BLOCK_SIZE,
    model_context_length=400,
    kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
    vocab_size=1000,
    hash_key=bytes(16),
)


class ShortestFirstMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.prompts = {}  # request id -> (its tokens, what had been computed when it came), until it is computed
        self.computed = 0
        self.number = 0

    @initialize(
        ageing=st.sampled_from([1.0, 0.3, 0.05]),
        budget=st.integers(3, 12),
        running=st.integers(1, 5),
        as_prefill=st.booleans(),
    )
    def start(self, ageing, budget, running, *, as_prefill):
        self.ageing = ageing
        self.config = SchedulerConfig(
            max_batch_tokens=budget,
            max_running_requests=min(running, budget),
            max_waiting_requests=20,
            order=None if as_prefill else "shortest",
            ageing=ageing,
        )
        self.scheduler = Scheduler(BlockPool(NUM_BLOCKS, BLOCK_SIZE), LIMITS, self.config)
        self.scheduler.assume(Role.PREFILL, self.config)

    @precondition(lambda self: self.scheduler.load().waiting_requests < 20)
    @rule(length=st.integers(1, 8) | st.integers(1, 60) | st.integers(100, 390), is_new=st.booleans())
    def submit(self, length, *, is_new):
        self.number += 1
        first = self.number % 1000 if is_new else 7  # of those that are not, prefixes may be cached
        request_id = RequestId(f"r{self.number}")
        request = Request(
            request_id=request_id,
            model="m",
            token_ids=pack_tokens([first, *range(1, length)]),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
        )
        self.scheduler.submit(request)
        self.prompts[request_id] = length, self.computed

    @rule(length=st.integers(8, 30), count=st.integers(30, 80))
    def pour(self, length, count):
        """Have short ones come all the time."""
        for _ in range(count):
            if self.scheduler.load().waiting_requests < 20:
                self.submit(length=length, is_new=True)
            self.compute(1)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.prompts)))
        self.scheduler.abort(request_id)
        del self.prompts[request_id]

    @rule(steps=st.integers(1, 10))
    def compute(self, steps):
        for _ in range(steps):
            plan = self.scheduler.plan()
            if plan is None:
                assert not self.prompts, "nobody waits while there is nothing to do"
                return
            table = self.scheduler.table
            served = {table.requests[slot].request_id for slot in plan.slots.tolist()}
            self.check_turns(served)
            self.computed += int(plan.num_new[plan.num_decode :].sum())
            step = self.scheduler.commit(plan, Sampled(np.where(plan.samples, 5, -1).astype(np.int32)))
            for delta in step.deltas:
                del self.prompts[delta.request_id]

    def check_turns(self, served):
        """Nobody gets anything while one waits that came so long before that its age alone is worth its whole prompt."""
        for request_id, (length, since) in self.prompts.items():
            if request_id in served:
                continue
            latest = max(self.prompts[other][1] for other in served)
            assert latest - since <= length / self.ageing, f"{request_id} is overtaken for too long"

    @invariant()
    def state_is_sound(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.compute(10_000)
            assert not self.prompts


ShortestFirstMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 4, stateful_step_count=20
)
TestShortestFirstMachine = ShortestFirstMachine.TestCase
