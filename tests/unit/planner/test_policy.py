"""What a policy makes of a decision."""

from dataclasses import replace

import msgspec
import pytest

from penstock.core.types.instances import Role
from penstock.planner.config import PlannerConfig
from penstock.planner.decider import RoleDecision, ScalingDecision
from penstock.planner.demand import ExpectedDemand
from penstock.planner.policy import Policy
from tests.support.planner_world import SLO, World

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE
MANY = ExpectedDemand(rate_per_s=1.0, input_tokens=50, output_tokens=20)
"""Short requests: chance alone moves their rate by less than 3 %."""
EXPECTED = ExpectedDemand(rate_per_s=1.0, input_tokens=100, output_tokens=100)


def decided(now, wanted):
    terms = tuple(
        RoleDecision(
            role=role, now=now[role], floor=count, reaction=count, keep=count, choice=count, why_not_fewer=""
        )
        for role, count in wanted.items()
    )
    return ScalingDecision(expected=EXPECTED, slo=SLO, terms=terms, gpus=0)


def damped(budget, *, may_flip=False, now=None, wanted=None):
    now, wanted = now or {P: 2, D: 2}, wanted or {P: 3, D: 1}
    policy = Policy(PlannerConfig(budget=budget), SLO, World({P: 1, D: 1}).capacities)
    return policy.damp(0.0, decided(now, wanted), now=now, start_s=0.0, may_flip=lambda *_: may_flip)


def test_workers_that_are_kept_for_their_cool_down_count_towards_the_budget():
    found = damped({"gpus": 4})
    assert found.target == {P: 2, D: 2}
    assert "prefill: 1 fewer, as the budget pays no more beside those that are kept" in found.why
    assert damped({"gpus": 5}).target == {P: 3, D: 2}
    assert damped(None).target == {P: 3, D: 2}
    assert damped({"gpus": 4}, may_flip=True).target == {P: 3, D: 1}, "a flip costs nothing"


def test_a_budget_takes_no_worker_away_by_itself():
    assert damped({"gpus": 3}, wanted={P: 2, D: 2}).target == {P: 2, D: 2}


@pytest.mark.parametrize(("hysteresis", "kept"), [(0.0, 3), (0.05, 4), (0.5, 4)])
def test_workers_go_only_where_the_rest_holds_more_load(hysteresis, kept):
    """Three hold the rate by 3 %: with a hysteresis of 5 % the fourth stays, and it is not started for that."""
    world = World({A: 4})
    policy = Policy(PlannerConfig(act={"hysteresis": hysteresis}), SLO, world.capacities)
    (capacity,) = world.capacities
    rate_per_s = capacity.rate_per_s(3, MANY, SLO) / 1.03
    expected = msgspec.structs.replace(MANY, rate_per_s=rate_per_s)
    for now, count in ((4, kept), (3, 3)):
        found = policy.decide(0.0, expected, now={A: now}, room={A: None}, factors={})
        assert found.target == {A: count}


@pytest.mark.parametrize(("usd", "kind"), [(3.0, {P, D}), (1.0, {A})])
@pytest.mark.parametrize("begun", [{A: 4}, {P: 2, D: 2}])
def test_the_cheapest_kind_is_chosen_by_the_unit_of_the_budget(begun, usd, kind):
    """Fewer GPUs of one kind may cost more than many of another."""
    world = World({A: 1, P: 1, D: 1}, budget={"usd_per_hour": 100})
    prices = {A: usd, P: 1.0, D: 1.0}
    priced = [replace(each, price=prices[each.role]) for each in world.capacities]
    policy = Policy(PlannerConfig(budget={"usd_per_hour": 100}), SLO, priced)
    expected = msgspec.structs.replace(MANY, rate_per_s=2 * priced[0].rate_per_s(1, MANY, SLO))
    found = policy.decide(1e6, expected, now=begun, room=dict.fromkeys(prices), factors={})
    assert found.target.keys() == kind
    assert found.cost == sum(count * prices[role] for role, count in found.target.items())
