"""Requests simulated on workers that would be left."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.core.types.instances import Role
from penstock.graph import build
from penstock.planner.decide.capacity import Capacity
from penstock.planner.estimate.expected_demand import ExpectedDemand
from penstock.planner.estimate.slo import Slo
from penstock.planner.observe.observation import Demand, Observation
from penstock.planner.rehearse.recent_demand import RecentDemand, RehearsedRequest
from penstock.planner.rehearse.rehearsal import rehearse
from penstock.planner.rehearse.rehearser import Rehearser
from penstock.sim.deployment import plan_deployment
from penstock.sim.loop.loop import run_virtual
from penstock.sim.report.report import latencies_s
from penstock.sim.simulate import simulate
from penstock.sim.workload.workload import WorkloadConfig, make_sessions
from tests.support.planner_world import SLO, World, digest

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE
CAPACITIES = World({A: 1}).capacities
PAIR = World({P: 1, D: 1}).capacities


def even(count, seconds, tokens=2000, output=100):
    return [RehearsedRequest(n * seconds / count, tokens, tokens, output) for n in range(count)]


@pytest.mark.parametrize("capacities", [CAPACITIES, PAIR], ids=["aggregated", "disaggregated"])
def test_more_workers_are_never_later(capacities):
    load = even(1500, 30)
    counts = [{each.role: count for each in capacities} for count in (1, 2, 4, 8)]
    found = [rehearse(load, workers, capacities, SLO) for workers in counts]
    late = [each.late for each in found]
    assert late == sorted(late, reverse=True)
    assert late[0] > 250
    assert late[-1] == 0
    assert "TTFT would be" in found[0].missed(SLO)


def test_what_never_ends_is_late_and_the_work_is_bounded():
    found = rehearse(even(200, 10, tokens=100_000), {A: 1}, CAPACITIES, SLO)
    assert found.ttft_s > 60
    assert found.missed(SLO).endswith(" ms at p99, above 500 ms")
    found = rehearse(even(20_000, 600, tokens=5, output=400), {A: 1}, CAPACITIES, SLO)
    assert found.is_whole
    endless = rehearse(even(400, 4, tokens=5, output=2_000_000), {A: 1}, CAPACITIES, SLO)
    assert endless.late, "they have not ended in time"
    slow = replace(CAPACITIES[0], max_batch_tokens=1)
    found = rehearse(even(10, 3000, tokens=1_000_000), {A: 1}, [slow], SLO)
    assert not found.is_whole
    assert not found.missed(SLO), "nothing is known"


def test_it_comes_near_to_the_real_simulator():
    """Two workers on the same requests: p90 of TTFT and ITL within a third, as the router's choice differs."""
    roles = {"aggregated": {"hardware": "h100", "replicas": 2, "max_batch_tokens": 512}}
    deployment = plan_deployment(build({"model": "llama-3.1-8b", "roles": roles}), beside=Path())
    config = WorkloadConfig(requests=240, rate_per_s=9.0, input_tokens=4000, output_tokens=120)
    sessions = list(make_sessions(config, random.Random(3)))
    ttft_s, itl_s, _ = latencies_s(simulate(deployment, sessions, seed=1))
    load = [
        RehearsedRequest(s.at_s, s.turns[0].input_tokens, s.turns[0].input_tokens, s.turns[0].output_tokens)
        for s in sessions
    ]
    capacity = Capacity(role=A, model=deployment.role_groups[0].latency, max_batch_tokens=512)
    found = rehearse(load, {A: 2}, [capacity], Slo(ttft_s=1.0, itl_s=1.0, percentile=90))
    assert found.ttft_s == pytest.approx(np.percentile(ttft_s, 90), rel=0.33)
    assert found.itl_s == pytest.approx(np.percentile(itl_s, 90), rel=0.33)


def seen(rate_per_s, seconds=10.0, tokens=2000):
    demand = Demand(
        arrivals_per_s=rate_per_s,
        input_tokens=digest(tokens, rate_per_s * seconds),
        output_tokens=digest(100, rate_per_s * seconds),
    )
    return Observation(at_s=0.0, seconds=seconds, demand=demand, frontends=("frontend-1",))


def expected(rate_per_s, **more):
    return ExpectedDemand(rate_per_s=rate_per_s, input_tokens=2000, output_tokens=100, **more)


def test_recent_requests_keep_their_bursts_and_have_the_expected_rate():
    recent = RecentDemand(60.0)
    for rate_per_s in (99.0, 0.0, 0.0, 30.0, 0.0, 0.0, 30.0):  # the first is too old
        recent.take(seen(rate_per_s), 10.0)
    assert recent.is_whole
    load = recent.replay(expected(20.0, queued=3, cached_share=0.25), random.Random(1))
    assert len(load) == 3 + 20 * 60
    assert [each.at_s for each in load] == sorted(each.at_s for each in load)
    assert sum(20 <= each.at_s < 30 for each in load) == 600
    assert sum(0 < each.at_s < 20 for each in load) == 0
    tokens = sum(each.input_tokens for each in load) / len(load)
    assert tokens == pytest.approx(2000, rel=0.06)
    assert sum(each.new_tokens for each in load) == pytest.approx(0.75 * tokens * len(load), rel=0.01)


@pytest.mark.parametrize(("rates", "count"), [({}, 20), ({P: 40.0, D: 20.0}, 40), ({P: 10.0, D: 30.0}, 30)])
def test_recent_requests_have_the_expected_work_of_the_role_with_the_most(rates, count):
    recent = RecentDemand(60.0)
    for _ in range(6):
        recent.take(seen(20.0), 10.0)
    load = recent.replay(expected(20.0, rates=rates), random.Random(1))
    assert len(load) == count * 60
    longer = expected(20.0, rates=rates)
    longer = msgspec.structs.replace(longer, input_tokens=4000, output_tokens=200)
    assert len(recent.replay(longer, random.Random(1))) == 2 * count * 60, (
        "as many tokens in shorter requests"
    )


def check(rates, now, target, rate_per_s):
    async def main():
        rehearser = Rehearser(60.0, SLO, CAPACITIES, again_s=60.0)
        for each in rates:
            rehearser.take(seen(each), 10.0)
        first = await rehearser.check({A: now}, {A: target}, expected(rate_per_s), {})
        again = await rehearser.check({A: now}, {A: target}, expected(rate_per_s), {})
        return first, again

    return run_virtual(main())


def test_bursts_that_a_mean_hides_keep_workers():
    even_load, _ = check([10.0] * 6, 4, 2, 10.0)
    assert (even_load.kept, even_load.why) == ({}, "")
    assert [trial.workers for trial in even_load.trials] == [{A: 2}]
    bursts, again = check([60.0, 0, 0, 0, 0, 0] * 2, 8, 2, 10.0)
    assert 2 < bursts.kept[A] <= 8
    assert "with 2 aggregated TTFT would be" in bursts.why
    assert bursts.trials[0].late > bursts.trials[1].late
    assert (again.kept, again.trials) == (bursts.kept, ()), "a refusal holds for a while"


def test_a_model_that_finds_everything_late_refuses_nothing():
    """A single prompt takes longer than the target on any number of workers."""
    found, _ = check([0.2] * 6, 4, 2, 0.2)
    assert not found.why

    async def main():
        strict = Slo(ttft_s=0.001, itl_s=0.025)
        rehearser = Rehearser(60.0, strict, CAPACITIES, again_s=60.0)
        for _ in range(6):
            rehearser.take(seen(1.0), 10.0)
        return await rehearser.check({A: 4}, {A: 2}, expected(1.0), {})

    found = run_virtual(main())
    assert found.trials[0].missed(Slo(ttft_s=0.001, itl_s=0.025))
    assert not found.why
