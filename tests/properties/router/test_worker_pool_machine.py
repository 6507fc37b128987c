"""A model's workers against the rule in its plainest form, computed anew from all of them after every change."""

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.ids import WorkerId
from penstock.core.types.instances import EngineInfo, Instance, InstanceState, ModelCard, Role
from penstock.router.fleet.member import Condition, FleetMember, identity
from penstock.router.fleet.worker_pool import ModelPool

CARDS = st.sampled_from(
    [
        ModelCard(name="m", context_length=100, block_size=4, salt=b"1"),
        ModelCard(name="m", context_length=200, block_size=4, salt=b"1"),
        ModelCard(name="m", context_length=100, block_size=8, salt=b"1"),
        ModelCard(name="m", context_length=100, block_size=4, salt=b"2"),
    ]
)
STATES = st.sampled_from(InstanceState)
ADAPTERS = st.lists(st.sampled_from("abc"), unique=True).map(tuple)
CONNECTION = object()


def make_instance(
    number: int, card: ModelCard, state: InstanceState, adapters: tuple[str, ...] = ()
) -> Instance:
    info = EngineInfo(
        block_size=4, total_blocks=9, context_length=99, max_batch_tokens=9, max_running_requests=9
    )
    return Instance(
        worker_id=WorkerId(number),
        name=f"w{number}",
        address="",
        role=Role.AGGREGATED,
        card=card,
        engine=info,
        state=state,
        adapters=adapters,
    )


class WorkerPoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = None
        self.members = []
        self.card = None
        self.joined = 0

    @rule(card=CARDS, state=STATES, adapters=ADAPTERS)
    def join(self, card, state, adapters):
        member = FleetMember(make_instance(self.joined, card, state, adapters), slot=self.joined)
        member.connection = CONNECTION
        self.joined += 1
        if self.pool is None:
            self.pool = ModelPool(member, 1, adapters_max=3)
        self.pool.grow(max(self.joined, len(self.pool.ready)))
        self.members.append(member)
        self.put(member)

    @precondition(lambda self: self.members)
    @rule(data=st.data(), card=CARDS, state=STATES, listed=st.booleans(), adapters=ADAPTERS)
    def change(self, data, card, state, listed, adapters):
        member = data.draw(st.sampled_from(self.members))
        member.instance = msgspec.structs.replace(member.instance, card=card, state=state, adapters=adapters)
        member.listed = listed
        self.put(member)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def leave(self, data):
        member = data.draw(st.sampled_from(self.members))
        self.members.remove(member)
        self.note(self.pool.remove(member))
        if not self.members:
            assert not len(self.pool)
            assert not self.pool.has_ready
            self.pool = self.card = None

    @precondition(lambda self: self.members)
    @rule()
    def choose_canonical(self):
        self.note(self.pool.choose_canonical())
        staying = [m for m in self.members if m.listed and m.instance.state is InstanceState.READY]
        cards = [m.identity for m in staying or self.members]
        assert cards.count(identity(self.pool.card)) == max(map(cards.count, cards))
        self.card = self.pool.card

    def put(self, member):
        changed = self.pool.put(member)
        assert member in changed
        self.note(changed)

    def note(self, changed):
        for member in changed:
            self.pool.set_ready(member.slot, is_ready=member.condition is Condition.READY)

    @invariant()
    def the_rule_holds(self):
        if self.pool is None:
            return
        self.pool.check()
        staying = [m for m in self.members if m.listed and m.instance.state is InstanceState.READY]
        counted = staying or self.members
        if self.card is None:
            self.card = counted[0].instance.card
        elif all(m.instance.card != self.card for m in counted):
            alike = [m for m in counted if m.identity == identity(self.card)]
            self.card = (alike or counted)[0].instance.card
        assert self.pool.card == self.card
        expected = [m.slot for m in self.members if m.condition is Condition.READY]
        assert np.flatnonzero(self.pool.ready).tolist() == sorted(expected)
        for adapter in "abc":
            holders = [m.slot for m in self.members if m.slot in expected and adapter in m.instance.adapters]
            assert np.flatnonzero(self.pool.adapters.among(self.pool.ready, adapter)).tolist() == sorted(
                holders
            )
            listed = self.pool.adapters.cards(self.pool.card).get(adapter)
            assert listed == (self.card.adapted(adapter) if holders else None)
        for member in self.members:
            assert member.matching == (member.identity == identity(self.card))


def test_adapters_past_the_bound_are_left_out_until_there_is_room():
    members = [
        FleetMember(
            make_instance(
                n, ModelCard(name="m", context_length=9, block_size=4, salt=b""), InstanceState.READY, a
            ),
            slot=n,
        )
        for n, a in enumerate([("a", "b"), ("b", "c"), ("c",)])
    ]
    pool = ModelPool(members[0], 3, adapters_max=2)
    for member in members:
        pool.put(member)
        pool.set_ready(member.slot, is_ready=True)
        pool.check()
    assert [pool.adapters.among(pool.ready, name).tolist().count(True) for name in "abc"] == [1, 2, 0]
    pool.remove(members[0])
    pool.put(members[2])
    pool.check()
    assert np.flatnonzero(pool.adapters.among(pool.ready, "c")).tolist() == [2], (
        "b still takes one of two places"
    )


TestWorkerPoolMachine = WorkerPoolMachine.TestCase
TestWorkerPoolMachine.settings = settings(stateful_step_count=30)
