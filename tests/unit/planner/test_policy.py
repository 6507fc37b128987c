"""What a policy makes of a decision."""

from penstock.core.types.instances import Role
from penstock.planner.config import PlannerConfig
from penstock.planner.decide.decision import Decision, RoleTerm
from penstock.planner.estimate.expected_demand import ExpectedDemand
from penstock.planner.policy import Policy
from tests.support.planner_world import SLO, World

P, D = Role.PREFILL, Role.DECODE
EXPECTED = ExpectedDemand(rate_per_s=1.0, input_tokens=100, output_tokens=100)


def decided(now, wanted):
    terms = tuple(
        RoleTerm(
            role=role,
            now=now[role],
            floor=count,
            reaction=count,
            keep=count,
            choice=count,
            why_not_fewer="",
        )
        for role, count in wanted.items()
    )
    return Decision(expected=EXPECTED, slo=SLO, terms=terms, gpus=0)


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
