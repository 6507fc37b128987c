"""The planner on a simulated deployment whose workers never start, lie about their load, die, and die while they drain.

Real requests run meanwhile, and none may fail. Seeded, in virtual time; planted bugs show that the checks find something.
"""

import asyncio
import random
from itertools import count
from pathlib import Path

import msgspec
import pytest

from penstock.core.types.instances import ReplicaState, Role
from penstock.graph import build
from penstock.planner.actor import Actor
from penstock.planner.damping import Damper
from penstock.sim.deployment import plan_deployment
from penstock.sim.scaling import ClusterChanges, planner_of
from penstock.sim.simulate import simulate
from tests.sim.planner.test_simulated_planner import GRAPH, LONG, WORKER, stepped

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE
FAULTY_S, END_S = 400.0, 800.0
MOST = 5
REPLACED_S = 80.0
"""A worker that does not start is gone after its deadline and a few rounds."""
SETTINGS = {"max_workers": MOST, "cool_down_s": 60, "act": {"start_deadline_s": 60}, "cold_s": 10}
ROLES = {
    "aggregated": {"aggregated": WORKER | {"replicas": 2}},
    "disaggregated": {"prefill": WORKER | {"replicas": 2}, "decode": WORKER | {"replicas": 2}},
}
ENOUGH = {A: 2, P: 2, D: 1}
"""Workers without which the last requests wait for ever."""


class Faults:
    """One seed's faults beside the planner, for `FAULTY_S`."""

    def __init__(self, graph, seed):
        self.rng = random.Random(seed)
        self.scale = planner_of(plan_deployment(graph, beside=Path()))
        self.seen = dict.fromkeys(("hang", "lie", "die", "die_draining"), 0)

    async def control(self, scaled):
        self.scaled = scaled
        self.begun_s = asyncio.get_running_loop().time()
        quick = scaled.changes.load

        async def load(name):
            if self.rng.random() < 0.3 and self.is_faulty():
                self.seen["hang"] += 1
                await asyncio.Event().wait()
            await quick(name)

        note = scaled.connector.on_state

        def on_state(replica):
            note(replica)
            self.drains(replica)
            is_known = any(each.name == replica.name for each in scaled.connector.workers)
            assert is_known or replica.name not in scaled.cluster.workers, f"{replica.name} runs on"

        scaled.changes.load, scaled.connector.on_state = load, on_state
        async with asyncio.TaskGroup() as group:
            group.create_task(self.scale(scaled))
            for number in count(1):
                await asyncio.sleep(0.5)
                self.check()
                if self.is_faulty() and number % 10 == 0:
                    self.fault()

    def is_faulty(self):
        return asyncio.get_running_loop().time() - self.begun_s < FAULTY_S

    def kill(self, name):
        self.scaled.cluster.settle(name)
        self.scaled.cluster.kill(name)

    def fault(self):
        running = self.scaled.cluster.workers
        serving = [
            each.name
            for each in self.scaled.connector.workers
            if each.state is ReplicaState.READY and each.name in running
        ]
        kind = self.rng.choice(["die", "lie", "lie", *["nothing"] * 17])
        if kind == "die" and len(serving) > 2:
            self.seen["die"] += 1
            self.kill(self.rng.choice(serving))
        elif kind == "lie" and serving:
            self.seen["lie"] += 1
            self.lie(running[self.rng.choice(serving)].worker)

    def drains(self, replica):
        """Let a worker die while it drains, or not."""
        runs = replica.name in self.scaled.cluster.workers
        if replica.state is ReplicaState.DRAINING and runs and self.rng.random() < 0.7:
            asyncio.get_running_loop().call_later(0.05, self.die_draining, replica.name)

    def die_draining(self, name):
        if name in self.scaled.cluster.workers:
            self.seen["die_draining"] += 1
            self.kill(name)

    def lie(self, worker):
        """Let a worker say for a minute that it has nothing to do, or a million requests that wait for hours."""
        much = self.rng.random() < 0.5
        told = {"waiting_requests": 10**6 * much, "running_requests": 0, "oldest_wait_s": 7200.0 * much}
        observe = worker.observe
        until_s = asyncio.get_running_loop().time() + 60

        def lying():
            is_over = asyncio.get_running_loop().time() > until_s
            return observe() if is_over else msgspec.structs.replace(observe(), **told)

        worker.observe = lying

    def check(self):
        """Raise AssertionError where connector and cluster disagree, or bounds are broken."""
        replicas, running = self.scaled.connector.workers, self.scaled.cluster.workers
        assert {each.name for each in replicas} >= running.keys(), "a worker that nobody knows of"
        for each in replicas:
            if each.state is ReplicaState.READY:
                worker = running.get(each.name)
                assert worker is not None, f"{each.name} is ready and does not run"
                assert worker.role is each.role, f"{each.name} is {worker.role}, known as {each.role}"
        for role in {each.role for each in replicas}:
            own = [each for each in replicas if each.role is role]
            serving = [each for each in own if each.state is ReplicaState.READY]
            assert len(serving) <= MOST, f"{len(serving)} {role}"
        pending = {ReplicaState.STARTING, ReplicaState.FAILED}
        late = [each.name for each in replicas if each.state in pending and each.age_s > REPLACED_S]
        assert not late, f"neither ready nor replaced: {late}"


def run(seed, kind="aggregated"):
    graph = build(GRAPH | {"roles": ROLES[kind], "planner": SETTINGS})
    load = stepped((FAULTY_S, 0.9, LONG), (END_S - FAULTY_S, 0.5, LONG), seed=seed)
    faults = Faults(graph, seed)
    deployment = plan_deployment(graph, beside=Path())
    recording = simulate(deployment, load, seed=seed, controller=faults.control, start_s=20.0)
    assert recording.failed == 0, recording.failures
    last = dict(recording.scaling.counts[-1][1])
    for role, found in last.items():
        most = ENOUGH[role] + 2
        assert found.ready <= most, f"{found.ready} {role} at the end, {most} are plenty"
    late = [
        first - sent
        for sent, first in zip(recording.sent_s, recording.first_token_s, strict=True)
        if sent > END_S - 200
    ]
    in_time = sum(ttft_s <= 4.0 for ttft_s in late) / len(late)
    assert in_time > 0.9, f"{in_time:.0%} in time at the end"
    return faults.seen


def run_all():
    for seed in range(3):
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROLES)
def test_no_request_fails_and_the_right_workers_are_left(kind):
    seen = [run(seed, kind) for seed in range(2)]
    for fault in seen[0]:
        assert sum(each[fault] for each in seen), f"no seed has {fault}"


def counts_workers_that_never_start(monkeypatch):
    monkeypatch.setattr(Actor, "_overdue", lambda *_: ())


def never_takes_away(monkeypatch):
    monkeypatch.setattr(Damper, "damp", lambda _self, _now_s, have, wanted, *_: min(MOST, max(have, wanted)))


def loses_those_that_die(monkeypatch):
    watch = ClusterChanges._watch

    async def blind(self, worker):
        self.on_failed = lambda _name: None
        await watch(self, worker)

    monkeypatch.setattr(ClusterChanges, "_watch", blind)


def drains_without_waiting(monkeypatch):
    """A drain that tells the connector at once that it has ended."""

    async def drain(self, name, done):
        self._cluster.drain(name)
        del self._tasks[name]
        self._leave(name, done)

    monkeypatch.setattr(ClusterChanges, "_drain", drain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug", [counts_workers_that_never_start, never_takes_away, loses_those_that_die, drains_without_waiting]
)
def test_a_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_all()
