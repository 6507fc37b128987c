"""Decisions on Llama 3.1 8B on H100, by the roofline."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.perf.hardware import find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.roofline import Roofline
from penstock.planner.capacity import Capacity
from penstock.planner.decider import Decider
from penstock.planner.demand import ExpectedDemand, SloTargets
from penstock.runtime.observations import Digest, bucket_of

MODEL = Roofline(find_shape("llama-3.1-8b"), find_hardware("h100"))
A, P, D = (
    Capacity(role=role, model=MODEL, max_batch_tokens=tokens)
    for role, tokens in ((Role.AGGREGATED, 512), (Role.PREFILL, 8192), (Role.DECODE, 512))
)
SLO = SloTargets(ttft_s=0.5, itl_s=0.025)
ONE = Decider(capacities=(A,), slo=SLO, budget=16)
TWO = Decider(capacities=(P, D), slo=SLO, budget=16)


def digest(values):
    counts = Counter(bucket_of(value) for value in values)
    return Digest(count=len(values), total=float(sum(values)), buckets=dict(counts))


RATES = st.floats(0.0, 400.0)
NOW = st.integers(0, 16)


def asked(rate_per_s, **more):
    return ExpectedDemand(rate_per_s=rate_per_s, input_tokens=2000, output_tokens=200, **more)


@given(low=RATES, more=RATES, now=NOW, decider=st.sampled_from([ONE, TWO]))
def test_more_demand_never_gets_fewer_gpus(low, more, now, decider):
    have = {capacity.role: now for capacity in decider.capacities}
    first, second = (decider.decide(asked(rate), have) for rate in (low, low + more))
    at_budget = first.shortfall or second.shortfall
    slack = 1 if at_budget and decider is TWO else 0  # a division of the budget is rounded down
    assert first.gpus <= second.gpus + slack


@given(rate=RATES, queued=st.integers(0, 5000), now=NOW, decider=st.sampled_from([ONE, TWO]))
def test_the_budget_is_kept(rate, queued, now, decider):
    found = decider.decide(
        asked(rate, queued=queued, ttft_s=3.0), {each.role: now for each in decider.capacities}
    )
    assert found.gpus <= 16
    assert all(term.choice >= 1 for term in found.terms)


@given(rate=st.floats(0.1, 400.0), decider=st.sampled_from([ONE, TWO]))
def test_the_choice_holds_the_slo_and_one_fewer_does_not(rate, decider):
    found = decider.decide(asked(rate), {})
    if found.shortfall:
        return
    for capacity, term in zip(decider.capacities, found.terms, strict=True):
        assert capacity.rate_per_s(term.choice, asked(rate), SLO) >= rate
        assert term.choice == 1 or capacity.rate_per_s(term.choice - 1, asked(rate), SLO) < rate


def test_scale_in_keeps_a_margin():
    rate = 0.99 * A.rate_per_s(4, asked(1.0), SLO)
    assert ONE.decide(asked(rate), {}).target == {Role.AGGREGATED: 4}
    kept = ONE.decide(asked(rate), {Role.AGGREGATED: 5})
    assert kept.target == {Role.AGGREGATED: 5}
    assert "margin" in kept.explain()
    assert ONE.decide(asked(0.5 * rate), {Role.AGGREGATED: 5}).target == {Role.AGGREGATED: 3}


def test_a_queue_adds_what_drains_it_in_time():
    rate = 0.99 * A.rate_per_s(4, asked(1.0), SLO)
    found = ONE.decide(asked(rate, queued=900), {Role.AGGREGATED: 4})
    chosen = found.target[Role.AGGREGATED]
    assert A.rate_per_s(chosen, asked(1.0), SLO) >= rate + 900 / ONE.drain_s
    assert chosen == 7
    assert "900 queued" in found.explain()


def test_a_worker_that_starts_for_minutes_drains_the_queue_later():
    rate = 0.99 * A.rate_per_s(4, asked(1.0), SLO)
    soon, late = (
        ONE.decide(asked(rate, queued=900, start_s=start_s), {Role.AGGREGATED: 4}).target[Role.AGGREGATED]
        for start_s in (0.0, 300.0)
    )
    assert (soon, late) == (7, 5)


def test_latencies_that_too_few_warm_workers_explain_add_nothing():
    """The forecast asks for four workers: that two warm ones miss the SLO says nothing new."""
    rate = 0.99 * A.rate_per_s(4, asked(1.0), SLO)
    for warm, choice in ((2, 4), (4, 8)):
        slow = asked(rate, itl_s=10 * SLO.itl_s, warm={Role.AGGREGATED: warm})
        assert ONE.decide(slow, {Role.AGGREGATED: 4}).target == {Role.AGGREGATED: choice}


def test_a_rate_that_wavers_by_chance_keeps_its_workers():
    """Two workers at 85 % of what one serves: equal requests waver by less, requests of very different lengths by more."""
    one = A.rate_per_s(1, asked(1.0), SLO)
    assert ONE.decide(asked(0.85 * one), {Role.AGGREGATED: 2}).target == {Role.AGGREGATED: 1}
    wide = digest([1] * 90 + [20_000] * 10)
    slow = Decider(capacities=(A.slower(10.0),), slo=SloTargets(ttft_s=5.0, itl_s=0.25), budget=16)
    one = slow.capacities[0].rate_per_s(1, asked(1.0, input_lengths=wide), slow.slo)
    held = asked(0.85 * one, input_lengths=wide)
    assert slow.decide(held, {}).target == {Role.AGGREGATED: 1}
    assert slow.decide(held, {Role.AGGREGATED: 2}).target == {Role.AGGREGATED: 2}


def test_too_few_requests_do_not_tell_that_an_slo_is_out_of_reach():
    decider = Decider(capacities=(A,), slo=SloTargets(ttft_s=0.005, itl_s=1.0), budget=6)
    few, enough = digest([2000] * 99), digest([2000] * 100)
    found = decider.decide(asked(9.0, input_lengths=few, output_lengths=enough), {Role.AGGREGATED: 2})
    assert (found.target, found.shortfall) == ({Role.AGGREGATED: 2}, "")
    assert "100 that a percentile of 99 needs" in found.explain()
    slow = asked(9.0, input_lengths=few, output_lengths=enough, ttft_s=0.0075)
    assert decider.decide(slow, {Role.AGGREGATED: 2}).target == {Role.AGGREGATED: 3}
    found = decider.decide(asked(9.0, input_lengths=enough, output_lengths=enough), {Role.AGGREGATED: 2})
    assert found.target == {Role.AGGREGATED: 6}


def test_an_slo_error_adds_in_proportion_to_the_role_that_causes_it():
    have = {Role.PREFILL: 4, Role.DECODE: 4}
    assert TWO.decide(asked(1.0, ttft_s=0.75), have).target == {Role.PREFILL: 6, Role.DECODE: 1}
    assert TWO.decide(asked(1.0, itl_s=0.1), have).target == {Role.PREFILL: 1, Role.DECODE: 8}
    waiting = TWO.decide(asked(1.0, decode_ttft_s=0.75), have)
    assert waiting.target == {Role.PREFILL: 1, Role.DECODE: 6}, "requests wait for decode workers"
    assert "decode: 5 would serve" in waiting.explain()
    assert "its SLO is missed now" in waiting.explain()


@pytest.mark.parametrize(
    ("slo", "bound"),
    [(SloTargets(ttft_s=0.005, itl_s=1.0), "TTFT"), (SloTargets(ttft_s=9.0, itl_s=0.001), "ITL")],
)
def test_an_slo_out_of_reach_names_the_bound_and_runs_at_max(slo, bound):
    found = Decider(capacities=(A,), slo=slo, budget=6).decide(asked(1.0), {})
    assert found.target == {Role.AGGREGATED: 6}
    assert f"idle worker's {bound}" in found.shortfall
    assert "ms above the target" in found.explain()


def test_without_demand_an_slo_out_of_reach_needs_one_replica():
    decider = Decider(capacities=(A,), slo=SloTargets(ttft_s=0.005, itl_s=1.0), budget=6)
    assert decider.decide(asked(0.0), {}).target == {Role.AGGREGATED: 1}
    assert decider.decide(asked(0.0, queued=1), {}).target == {Role.AGGREGATED: 6}


def test_a_budget_in_dollars_that_is_too_small_is_divided():
    dear = tuple(replace(each, price=2.0) for each in (P, D))
    found = Decider(capacities=dear, slo=SLO, budget=12.0).decide(asked(115.0), {})
    assert found.gpus <= 6
    assert found.shortfall


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"budget": 1}, "one replica of each role costs 2"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"capacities": (P,)}, "expected one aggregated"),
        ({"slo": SloTargets(ttft_s=-1.0, itl_s=1.0)}, "targets above 0"),
        ({"hysteresis": -1.0}, "hysteresis is -1.0"),
    ],
)
def test_bad_settings_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        Decider(**{"capacities": (P, D), "slo": SLO, "budget": 8, **changes})


def test_cached_prompts_need_fewer_prefill_workers():
    computed, cached = (TWO.decide(asked(60.0, cached_share=share), {}).target for share in (0.0, 0.8))
    assert cached[Role.PREFILL] < computed[Role.PREFILL]
    assert cached[Role.DECODE] == computed[Role.DECODE]
