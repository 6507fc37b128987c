"""Loads against a worker that takes requests in order and reports when it likes."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.types.load import WorkerLoad
from penstock.router.fleet.loads import LoadTracker, Reserved

SLOTS = st.integers(0, 3)


class LoadsMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.loads = LoadTracker()
        self.loads.grow(4)
        self.live = []
        self.on_the_way = [deque() for _ in range(4)]  # sent, not yet arrived
        self.accepted = [0] * 4
        self.at_worker = [set() for _ in range(4)]  # arrived and running there
        self.report_in_flight = [deque() for _ in range(4)]
        self.own = {}  # reservation -> [prefill until the first token, blocks], until its end
        self.expected = {}  # reservation -> (prefill, blocks) not in any report received so far

    @rule(slot=SLOTS, prefill=st.integers(1, 1000), blocks=st.integers(0, 50))
    def reserve(self, slot, prefill, blocks):
        reservation = self.loads.reserve(slot, prefill, blocks)
        self.live.append(reservation)
        self.on_the_way[slot].append(reservation)
        self.expected[reservation] = [prefill, blocks]
        self.own[reservation] = [prefill, blocks]

    @rule(slot=SLOTS)
    def arrive(self, slot):
        if self.on_the_way[slot]:
            self.at_worker[slot].add(self.on_the_way[slot].popleft())
            self.accepted[slot] += 1

    @rule(slot=SLOTS)
    def worker_reports(self, slot):
        running = len(self.at_worker[slot])
        load = WorkerLoad(running_requests=running, accepted_requests=self.accepted[slot])
        self.report_in_flight[slot].append((load, set(self.at_worker[slot])))

    @rule(slot=SLOTS)
    def report_comes(self, slot):
        if self.report_in_flight[slot]:
            load, included = self.report_in_flight[slot].popleft()
            self.loads.report(slot, load)
            for reservation in included:
                self.expected.pop(reservation, None)
            # never double: what the report includes is not reserved as well
            assert self.loads.running_requests[slot] == load.running_requests + sum(
                r.slot == slot for r in self.expected
            )

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def first_token(self, data):
        reservation = data.draw(st.sampled_from(self.live))
        self.loads.prefill_done(reservation)
        self.own[reservation][0] = 0
        if reservation in self.expected:
            self.expected[reservation][0] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        reservation = data.draw(st.sampled_from(self.live))
        self.live.remove(reservation)
        self.loads.release(reservation)
        del self.own[reservation]
        self.expected.pop(reservation, None)
        self.at_worker[reservation.slot].discard(reservation)

    @rule(slot=SLOTS)
    def lose_worker(self, slot):
        self.loads.reset(slot)
        self.on_the_way[slot].clear()
        self.report_in_flight[slot].clear()
        self.accepted[slot] = 0
        for reservation in [r for r in self.live if r.slot == slot]:
            self.live.remove(reservation)
            self.loads.release(reservation)
            del self.own[reservation]
            self.expected.pop(reservation, None)
        self.at_worker[slot].clear()

    @invariant()
    def sums_agree(self):
        self.loads.check()
        for slot in range(4):
            mine = [sums for r, sums in self.expected.items() if r.slot == slot]
            assert self.loads.reserved(slot) == Reserved(
                len(mine), sum(prefill for prefill, _ in mine), sum(blocks for _, blocks in mine)
            )
            assert self.loads.open_requests(slot) == sum(r.slot == slot for r in self.live)
            own = [sums for r, sums in self.own.items() if r.slot == slot]
            assert self.loads.own_requests[slot] == len(own)
            assert self.loads.own_prefill_tokens[slot] == sum(prefill for prefill, _ in own)
            assert self.loads.own_blocks[slot] == sum(blocks for _, blocks in own)

    def teardown(self):
        for reservation in getattr(self, "live", ()):
            self.loads.release(reservation)
        if hasattr(self, "loads"):
            assert all(self.loads.reserved(slot) == Reserved(0, 0, 0) for slot in range(4))
            self.loads.check()


TestLoadsMachine = LoadsMachine.TestCase
TestLoadsMachine.settings = settings(stateful_step_count=40)
