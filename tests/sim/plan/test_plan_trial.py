"""Layouts on the simulator: what was predicted comes about, both kinds, and too much is seen to be too much."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.perf.hardware import find_hardware
from penstock.perf.pool import Demand
from penstock.plan.question import Question, graph_of
from penstock.plan.trial import Effort, requests_of_run, simulate_rate, try_layout
from penstock.sim.deployment import plan_deployment

DEMAND = Demand(input_tokens=1500, output_tokens=30, ttft_s=0.5, itl_s=0.012)
EFFORT = Effort(requests=200, precision=0.1, step=1.1, layouts=1)


@pytest.fixture(scope="module")
def question():
    return Question(model="llama-3.1-8b", hardware=find_hardware("h100"), devices=2, demand=DEMAND)


@pytest.mark.parametrize("kind", ["aggregated", "disaggregated"])
def test_the_simulator_finds_about_what_was_predicted(question, kind):
    layout = getattr(question.search(), kind)()[0]
    proposal = try_layout(question, layout, EFFORT)
    assert proposal is not None
    assert proposal.is_simulated
    assert proposal.seen.rate_per_s == pytest.approx(layout.rate_per_s, rel=0.3)
    assert proposal.seen.meets(DEMAND)
    assert 0 < proposal.seen.kv_share < 1
    assert try_layout(question, layout, EFFORT) == proposal, "it repeats"


def test_too_much_is_seen(question):
    layout = question.search().disaggregated()[0]
    deployment = plan_deployment(graph_of(question, layout), beside=Path())
    few, many = (simulate_rate(deployment, DEMAND, factor * layout.rate_per_s, 200) for factor in (0.5, 2.0))
    assert few.meets(DEMAND)
    assert not many.meets(DEMAND)
    assert few.ttft_s < many.ttft_s


def test_what_never_keeps_the_targets_is_no_proposal(question):
    layout = question.search().aggregated()[0]
    impatient = replace(DEMAND, ttft_s=0.001)
    asked = Question(
        model="llama-3.1-8b",
        hardware=question.hardware,
        devices=2,
        demand=impatient,
        formats=question.formats,
    )
    coarse = replace(EFFORT, requests=50, step=3.0)
    assert try_layout(asked, layout, coarse) is None


def test_a_run_outlasts_its_requests():
    assert requests_of_run(DEMAND, 1.0, 200) == 200
    assert requests_of_run(replace(DEMAND, input_tokens=100_000), 1.0, 500) == 150, "long prompts take long"
    assert requests_of_run(DEMAND, 1.0, 100) == 100
    lifetime_s = 0.5 + 30 * 0.012
    assert requests_of_run(DEMAND, 1000.0, 200) == math.ceil(2 * lifetime_s * 1000)


def test_a_rate_that_is_known_to_do_is_where_the_search_goes_on(question):
    layout = question.search().aggregated()[0]
    known = try_layout(question, layout, EFFORT).seen
    again = try_layout(question, layout, EFFORT, known)
    assert again.seen.rate_per_s >= known.rate_per_s
    hopeless = replace(known, rate_per_s=20 * known.rate_per_s)
    assert try_layout(question, layout, replace(EFFORT, step=1.1), hopeless).seen == hopeless
