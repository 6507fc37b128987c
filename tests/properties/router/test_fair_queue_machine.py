"""The queue of held requests: nothing is lost, all is bounded, shares are fair and nobody starves."""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.core.errors import Overloaded
from penstock.core.ids import RequestId
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.router.config import QueueConfig
from penstock.router.fair_queue import FairQueue, QueuedRequest

TOKENS_MAX = 50
CONFIG = QueueConfig(
    tenant_burst_tokens=0, requests_max=24, looked_at_max=4, work_weight=2.0, overtaken_s_max=10.0
)
FACTOR = CONFIG.priority_factor
QUEUE_KEYS = ((None, False), (None, True), ("adapter", False))


class HoldMachine(RuleBasedStateMachine):
    config = CONFIG

    def __init__(self):
        super().__init__()
        self.queue = FairQueue(self.config)
        self.waiting = []
        self.served = {}  # (priority, tenant) -> tokens, while it has requests waiting all the time
        self.served_priority = {}
        self.now_s = 0.0

    @rule(
        tenant=st.sampled_from("abcd"),
        queue_key=st.sampled_from(QUEUE_KEYS),
        priority=st.integers(-2, 2),
        tokens=st.integers(1, TOKENS_MAX),
        work_s=st.floats(0, 20),
    )
    def put(self, tenant, queue_key, priority, tokens, work_s):
        request = Request(
            request_id=RequestId("r"), model="m", token_ids=pack_tokens(range(tokens)),
            sampling=SamplingParams(max_tokens=1), tenant=tenant, priority=priority,
        )  # fmt: skip
        queued = QueuedRequest(request, self.now_s, work_s, share_s=work_s / 3, queue_key=queue_key)
        mine = sum(one.tenant == tenant for one in self.waiting)
        refused = len(self.waiting) >= 24 or (mine and mine >= 24 - len(self.waiting))
        if refused:
            with pytest.raises(Overloaded) as error:
                self.queue.put(queued)
            assert 1 <= error.value.retry_after_s <= 60
            return
        self.queue.put(queued)
        self.waiting.append(queued)
        if self.flow(queued) not in self.served:
            self.forget(queued)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def take(self, data):
        candidates = next(self.queue.heads())
        assert 1 <= len(candidates) <= 4
        queued = data.draw(st.sampled_from(list(candidates)))
        self.now_s += 1.0
        self.queue.take(queued, self.now_s)
        self.waiting.remove(queued)
        self.served[self.flow(queued)] += queued.tokens
        self.served_priority[self.flow(queued)[0]] += queued.tokens
        self.settle(queued)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data):
        queued = data.draw(st.sampled_from(self.waiting))
        self.queue.discard(queued)
        self.waiting.remove(queued)
        self.settle(queued)

    def flow(self, queued):
        return min(max(queued.request.priority, -1), 1), queued.tenant

    def settle(self, queued):
        """Whoever has nothing waiting is compared no more."""
        if self.flow(queued) not in map(self.flow, self.waiting):
            del self.served[self.flow(queued)]

    def forget(self, queued):
        """From here on, both the newcomer and those beside it are compared anew."""
        priority = self.flow(queued)[0]
        self.served[self.flow(queued)] = 0
        for flow in self.served:
            if flow[0] == priority:
                self.served[flow] = 0
        self.served_priority = dict.fromkeys((-1, 0, 1), 0)

    @invariant()
    def nothing_is_lost(self):
        self.queue.check()
        assert len(self.queue) == len(self.waiting)
        heads = list(self.queue.heads())
        assert [head[0].queue_key for head in heads] == list(
            dict.fromkeys(head[0].queue_key for head in heads)
        )
        assert {head[0].queue_key for head in heads} == {queued.queue_key for queued in self.waiting}, (
            "each queue key, once"
        )
        assert all(queued.queue_key == head[0].queue_key for head in heads for queued in head)

    @invariant()
    def tenants_get_equal_shares(self):
        """Counted from when the last of them came, who may owe one prompt; then each turn is off by one, or by the look around."""
        for priority in (-1, 0, 1):
            shares = [tokens for (of, _), tokens in self.served.items() if of == priority]
            if shares:
                bound = 6 * TOKENS_MAX + self.config.tenant_burst_tokens
                assert max(shares) - min(shares) <= bound, f"{self.served}"

    @invariant()
    def priorities_get_their_shares(self):
        """Counted from when the last request came to a priority without requests."""
        waiting = {self.flow(queued)[0] for queued in self.waiting}
        for low in waiting:
            for high in waiting:
                if low < high and self.served_priority:
                    due = self.served_priority[low] / FACTOR**low - self.served_priority[high] / FACTOR**high
                    assert due <= TOKENS_MAX * FACTOR * 2, f"{self.served_priority}"


class BurstMachine(HoldMachine):
    config = CONFIG.model_copy(update={"tenant_burst_tokens": 200})


TestHold = HoldMachine.TestCase
TestHold.settings = settings(stateful_step_count=40)
TestBurst = BurstMachine.TestCase
TestBurst.settings = settings(stateful_step_count=40)


def test_a_planted_bug_is_found(monkeypatch):
    monkeypatch.setattr(FairQueue, "discard", lambda self, queued: None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            HoldMachine,
            settings=settings(
                max_examples=100,
                stateful_step_count=40,
                deadline=None,
                database=None,
                phases=(Phase.generate,),
            ),
        )
