"""The planner against workers that do not start, die while they drain, or lie about their load: seeded, in virtual time.

Each trial checks at every round what may never happen, and after the faults that the workers are as many as the demand needs.
Planted bugs show that the checks find something.
"""

import asyncio
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec
import pytest

from penstock.core.errors import RequestError
from penstock.core.types.instances import ReplicaState, Role
from penstock.planner.actor import Actor, StartBackoff
from penstock.planner.damping import Damper
from penstock.planner.memory_connector import TimedChanges
from penstock.sim.loop import run_virtual
from tests.support.planner_world import World

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE
MOST = 12
SETTINGS = {
    "max_workers": MOST,
    "cool_down_s": 60.0,
    "cold_s": 10.0,
    "act": {"start_deadline_s": 60.0, "hold_s": 120.0},
}
FAULTY_ROUNDS = 160
QUIET_ROUNDS = 200
SEEDS = range(12)


@dataclass(frozen=True)
class Starts(TimedChanges):
    """Starts of 20 s; those before `begin_s` and of workers that hang never end."""

    begin_s: float = 0.0
    hung: set[str] = field(default_factory=set)

    def start(self, name, role, done):
        def ended(error):
            if name not in self.hung:
                done(error)

        if asyncio.get_running_loop().time() >= self.begin_s:
            super().start(name, role, ended)


class Trial:
    """One seed: demand that steps, faults for 160 rounds, then peace."""

    def __init__(self, seed, replicas):
        self.rng = random.Random(seed)
        self.starts = Starts()
        self.world = World(replicas, changes=self.starts, **SETTINGS)
        self.connector, self.roles = self.world.connector, list(replicas)
        self.directions = []
        self.person_until_s = 0.0

    def fault(self):
        """Do one thing that a machine or a person does."""
        loop = asyncio.get_running_loop()
        workers = self.connector.workers
        worker = self.rng.choice(workers)
        kind = self.rng.choice(["hang", "die", "lie", "load", "nothing", "nothing", "person"])
        if kind == "hang" and worker.state is ReplicaState.STARTING:
            self.starts.hung.add(worker.name)
        elif kind == "die" and worker.state is ReplicaState.DRAINING:
            self.connector.end(worker.name)
        elif kind == "lie":
            self.world.queued = self.rng.choice([0, 0, 5, 500, 10**6])
            self.world.ttft_s = self.rng.choice([0.0, 0.1, 0.6, 1e6])
        elif kind == "load":
            self.world.rate_per_s = self.rng.choice([0.0, 2.0, 20.0, 60.0])
        elif kind == "person" and self.rng.random() < 0.15:
            return self.person(loop.time())
        return None

    async def person(self, now_s):
        try:
            await self.connector.add(self.rng.choice(self.roles), 1, by="penstock scale")
        except RequestError:
            return
        self.person_until_s = now_s + SETTINGS["act"]["hold_s"]

    async def round(self):
        now_s = asyncio.get_running_loop().time()
        held_until_s = self.person_until_s
        before = await self.connector.scale()
        record = await self.world.planner.step()
        after = await self.connector.scale()
        pending = {ReplicaState.STARTING, ReplicaState.FAILED}
        for limit in after.limits:
            own = [each for each in after.of(limit.role) if each.name not in record.overdue]
            assert len(own) <= max(MOST, len(before.of(limit.role))), f"{limit.role}: {len(own)} at {now_s}"
            wanted = record.target.get(limit.role)
            started = record.adds.get(limit.role, 0)
            was = [each for each in before.of(limit.role) if each.name not in record.overdue]
            if wanted is not None and started:
                assert len(was) + started <= wanted, f"{started} more beside {len(was)} for {wanted}"
            starting = [each for each in own if each.state in pending and each.age_s < 20.0]
            assert len(starting) <= MOST
        serving = [each for each in after.replicas if each.role is not P and each.state is ReplicaState.READY]
        was_serving = [
            each for each in before.replicas if each.role is not P and each.state is ReplicaState.READY
        ]
        assert serving or not was_serving, "nobody answers any more"
        if now_s < held_until_s:
            assert after.revision == before.revision, "a person's change was undone"
        if record.is_change and not record.overdue:
            total = sum(record.target.values()) - sum(record.now.values())
            if total:
                self.directions.append((now_s, total > 0))
        return record

    async def run(self):
        for _ in range(FAULTY_ROUNDS):
            if (act := self.fault()) is not None:
                await act
            await self.round()
            await asyncio.sleep(5.0)
        self.world.queued, self.world.ttft_s, self.world.rate_per_s = 0, 0.1, 20.0
        self.person_until_s = 0.0
        calm_s = asyncio.get_running_loop().time() + 600
        for _ in range(QUIET_ROUNDS):
            await self.round()
            await asyncio.sleep(5.0)
        scale = await self.connector.scale()
        for limit in scale.limits:
            ready = sum(each.state is ReplicaState.READY for each in scale.of(limit.role))
            needed = self.world.needed(20.0, limit.role)
            assert needed <= ready <= needed + 2, f"{limit.role}: {ready} ready, {needed} are needed"
        turns = [up for at_s, up in self.directions if at_s > calm_s]
        changes = sum(one != other for one, other in pairwise(turns))
        assert changes <= 1, "oscillates"


def run(seed, replicas):
    run_virtual(Trial(seed, replicas).run())


def run_all():
    for seed in SEEDS:
        run(seed, {A: 2})


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in SEEDS[2:])]
)
@pytest.mark.parametrize("replicas", [{A: 2}, {P: 1, D: 2}], ids=["aggregated", "disaggregated"])
def test_faults_break_no_rule_and_leave_the_right_workers(seed, replicas):
    run(seed, replicas)


def ignores_pending(monkeypatch):
    """An actor that does not see workers that start, and adds them again each round."""
    look = Actor.look

    async def blind(self, silent):
        seen = await look(self, silent)
        ready = tuple(each for each in seen.scale.replicas if each.state is ReplicaState.READY)
        scale = msgspec.structs.replace(seen.scale, replicas=ready)
        return replace(seen, scale=scale, now={role: len(scale.of(role)) for role in seen.now})

    monkeypatch.setattr(Actor, "look", blind)


def ignores_people(monkeypatch):
    """An actor that takes every change for its own."""
    monkeypatch.setattr(
        Actor, "_notice", lambda self, scale, _now_s: setattr(self, "_revision", scale.revision)
    )


HOURS_S = 2 * 3600


def starts_while_none_succeeds(seed):
    """Let each start fail for hours of changing demand, and none later; returns the times at which workers were added."""
    rng = random.Random(seed)

    async def main():
        world = World({A: 2}, changes=Starts(begin_s=HOURS_S), **SETTINGS)
        world.rate_per_s = 60.0
        loop, added = asyncio.get_running_loop(), []
        while loop.time() < HOURS_S:
            if rng.random() < 0.02:
                world.rate_per_s = rng.choice([60.0, 80.0, 100.0])
            record = await world.planner.step()
            if record.adds:
                added.append(loop.time())
            scale = await world.connector.scale()
            assert sum(each.state is ReplicaState.READY for each in scale.of(A)) == 2, "they serve"
            await asyncio.sleep(5.0)
        world.rate_per_s = 20.0
        for _ in range(480):
            await world.planner.step()
            await asyncio.sleep(5.0)
        needed = world.needed(20.0)
        assert needed <= (await world.counts())[A] <= needed + 2, "nothing was made up for"
        return added

    return run_virtual(main())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_starts_that_all_fail_are_tried_seldom(seed):
    added = starts_while_none_succeeds(seed)
    assert added, "nothing was tried"
    assert len(added) < 40, "the demand grows within a few tries, and each is made up for"
    assert sum(at_s > HOURS_S / 2 for at_s in added) <= 8, "a try each half hour, and growth meanwhile"


def test_starts_that_are_tried_for_ever_are_found(monkeypatch):
    monkeypatch.setattr(StartBackoff, "wait_s", lambda *_: 0.0)
    assert len(starts_while_none_succeeds(0)) > 100


@pytest.mark.parametrize("bug", [ignores_pending, ignores_people])
def test_a_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        run_all()


def test_a_damper_without_cool_down_is_found(monkeypatch):
    """Demand that rises and falls within a minute makes it start and end workers each time."""

    async def turns():
        world = World({A: 2}, start_s=20.0, **SETTINGS | {"cool_down_s": 300.0})
        ups = []
        for number in range(240):
            world.rate_per_s = 20.0
            world.queued = 400 if number % 12 < 3 else 0
            record = await world.planner.step()
            if total := sum(record.target.values()) - sum(record.now.values()):
                ups.append(total > 0)
            await asyncio.sleep(5.0)
        return sum(one != other for one, other in pairwise(ups))

    assert run_virtual(turns()) <= 4
    monkeypatch.setattr(Damper, "_most", lambda _self, _now_s, target, _cool_down_s: target)
    assert run_virtual(turns()) > 4
