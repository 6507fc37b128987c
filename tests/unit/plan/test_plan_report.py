"""What an answer says: ranked rows, documented keys, a page with its curve."""

import html
import json
import re
from concurrent.futures import Future
from dataclasses import replace

import pytest

from penstock.perf.hardware import find_hardware
from penstock.perf.pool import Demand
from penstock.plan.answer import (
    USUAL,
    PlanAnswer,
    Point,
    find_answer,
    promising,
    raise_by_stricter,
    user_targets,
)
from penstock.plan.question import Question
from penstock.plan.report import describe, make_page, make_report, rows
from penstock.plan.trial import Proposal, TrialLatencies, predicted


@pytest.fixture(scope="module")
def question():
    demand = Demand(input_tokens=1000, output_tokens=100, ttft_s=1.0, itl_s=0.01)
    return Question(model="llama-3.1-8b", hardware=find_hardware("h100"), devices=4, demand=demand)


@pytest.fixture(scope="module")
def answer(question):
    search = question.search()
    disaggregated, aggregated = search.disaggregated()[0], search.aggregated()[0]
    seen = TrialLatencies(rate_per_s=40.0, ttft_s=0.8, itl_s=0.008, kv_share=0.25)
    proposals = (
        Proposal(disaggregated, seen, is_simulated=True),
        predicted(replace(aggregated, rate_per_s=20.0)),
    )
    return PlanAnswer(question, proposals, (Point(50.0, 30.0, 20.0), Point(100.0, 8.0, 16.0)))


def test_rows_are_ranked_and_say_who_found_them(answer):
    head, first, second = rows(answer)
    assert len(head) == len(first) == len(second)
    assert dict(zip(head, first, strict=True)) | {"deployment": ""} == {
        "#": "1", "deployment": "", "GPUs": "4", "requests/s": "40", "requests/s a GPU": "10", "tokens/s a GPU": "1e+03",
        "TTFT": "800 ms", "TPOT": "8 ms", "KV headroom": "75%", "by": "simulation",
    }  # fmt: skip
    assert "prefill (" in first[1]
    assert "decode (" in first[1]
    assert second[-1] == "model alone"


class Contrary:
    """Processes whose simulator finds the less, the more was predicted, and that aggregated workers on two devices are too slow."""

    def submit(self, _function, _question, layout, _effort, known=None):
        """Finds no more for a layout that is known to keep stricter targets."""
        done = Future()
        seen = TrialLatencies(1000 / layout.rate_per_s, ttft_s=0.5, itl_s=0.005, kv_share=0.5)
        is_good = layout.is_disaggregated or layout.role_layouts[0].parallel.tp != 2
        if known is not None:
            done.set_result(Proposal(layout, known, is_simulated=True))
        else:
            done.set_result(Proposal(layout, seen, is_simulated=True) if is_good else None)
        return done


def test_layouts_are_ranked_by_what_the_simulator_finds(question):
    found = find_answer(replace(question, devices=2), Contrary()).proposals
    assert len({proposal.layout.rate_per_s for proposal in found}) > 3
    assert {proposal.layout.is_disaggregated for proposal in found} == {True, False}
    seen = [proposal.seen.rate_per_s for proposal in found]
    assert seen == sorted(seen, reverse=True)
    predicted_per_s = [proposal.layout.rate_per_s for proposal in found]
    assert predicted_per_s == sorted(predicted_per_s)


def test_what_keeps_stricter_targets_is_not_lost_at_laxer_ones(question):
    strict = find_answer(replace(question, devices=2), Contrary()).proposals
    best = replace(strict[0], seen=replace(strict[0].seen, rate_per_s=10 * strict[0].seen.rate_per_s))
    laxer = replace(question, devices=2, demand=replace(question.demand, itl_s=0.02))
    found = find_answer(laxer, Contrary(), kept=[best])
    assert found.best == best
    assert [proposal.layout.role_layouts for proposal in found.proposals].count(best.layout.role_layouts) == 1


def test_a_curve_never_gives_less_at_a_laxer_target():
    found = raise_by_stricter([Point(10.0, 3.0, 5.0), Point(20.0, 4.0, 2.0), Point(30.0, 1.0, 3.0)])
    assert found == (Point(10.0, 4.0, 5.0), Point(20.0, 4.0, 3.0), Point(30.0, 1.0, 3.0))


def test_both_kinds_are_compared(answer):
    assert describe(answer).endswith("disaggregated serving gives 2.00 times the rate of aggregated workers")
    alone = replace(answer, proposals=answer.proposals[:1])
    assert describe(alone).endswith("aggregated: no layout meets the targets on these devices")


def test_the_report_has_its_documented_keys(answer):
    report = json.loads(json.dumps(make_report(answer), allow_nan=False))
    assert list(report) == ["model", "hardware", "gpus", "formats", "isl", "osl", "slo", "layouts", "curve"]
    best = report["layouts"][0]
    assert best["kind"] == "disaggregated"
    assert best["requests_per_s_per_gpu"] == 10
    assert best["tokens_per_s_per_gpu"] == 1000
    assert best["kv_headroom"] == 0.75
    assert set(best["graph"]["roles"]) == {"prefill", "decode"}
    assert report["curve"][1] == {
        "tokens_per_s_per_user": 100.0,
        "aggregated_tokens_per_s_per_gpu": 200.0,
        "disaggregated_tokens_per_s_per_gpu": 400.0,
    }


def test_the_page_has_the_curve_and_the_table_and_asks_nobody(answer):
    page = make_page(answer)
    assert "http" not in page
    (chart,) = re.findall(r'data-chart="([^"]*)"', page)
    drawn = json.loads(html.unescape(chart))
    lines, dots = ([each for each in drawn["series"] if each["kind"] == kind] for kind in ("line", "dots"))
    assert [each["name"] for each in lines] == ["aggregated", "disaggregated"]
    assert {50.0, 100.0} <= set(drawn["xs"])
    assert len(dots) == 1, "only what was simulated"
    assert page.count("<tr>") == 3


def test_the_best_of_each_spread_are_simulated(question):
    layouts = question.search().aggregated()
    chosen = promising(question, layouts, USUAL)
    assert chosen[0] == layouts[0]
    assert len(chosen) == 3
    assert len({layout.role_layouts[0].parallel for layout in chosen}) == 3
    one = [
        layout for layout in layouts if layout.role_layouts[0].parallel == layouts[0].role_layouts[0].parallel
    ]
    assert promising(question, one, USUAL) == one[:3]
    apart = promising(question, question.search().disaggregated(), USUAL)
    spreads = {(*(each.parallel for each in layout.role_layouts), layout.local > 0) for layout in apart}
    assert len(spreads) == 3


def test_the_best_without_data_parallel_ranks_is_simulated_where_all_better_ones_have_them():
    demand = Demand(input_tokens=2048, output_tokens=512, ttft_s=2.0, itl_s=0.05)
    wide = Question(
        model="deepseek-r1",
        hardware=find_hardware("h100"),
        devices=32,
        demand=demand,
        formats={"weight_dtype": "fp8"},
    )
    layouts = wide.search().aggregated()
    first, second = promising(wide, layouts, replace(USUAL, layouts=2, requests_max=10**9))
    assert first == layouts[0]
    assert first.role_layouts[0].parallel.dp > 1
    assert second == next(layout for layout in layouts if layout.role_layouts[0].parallel.dp == 1)


def test_targets_go_from_slow_reading_to_the_quickest_worker(question):
    targets = user_targets(question)
    assert targets == sorted(targets)
    assert targets[0] == 5
    quickest = max(1 / model.decode_step_s(1, 1050) for model in question.search().models)
    assert 0.9 * quickest < targets[-1] < quickest


def test_what_would_take_too_long_is_not_simulated(question):
    layout = question.search().aggregated()[0]
    assert promising(question, [replace(layout, rate_per_s=1e5)], USUAL) == []
