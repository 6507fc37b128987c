"""An answer as text, as a table, and as a page: tokens/s per user against tokens/s per GPU."""

import html
from typing import Any

import numpy as np

from penstock.perf.search import Layout, RoleLayout
from penstock.plan.answer import PlanAnswer
from penstock.plan.question import graph_data, parallel_name
from penstock.plan.trial import Proposal
from penstock.sim.charts import Chart, ChartLine, Dots, XAxis, chart_grid, make_document, say_s

_HEAD = (
    "#", "deployment", "GPUs", "requests/s", "requests/s a GPU", "tokens/s a GPU", "TTFT", "TPOT", "KV headroom", "by",
)  # fmt: skip


def describe(answer: PlanAnswer) -> str:
    """Give two lines: the question, and the gain of disaggregation."""
    question, demand = answer.question, answer.question.demand
    return (
        f"{question.model} on {question.devices} {question.hardware.name}, {demand.input_tokens:,} tokens in and"
        f" {demand.output_tokens:,} out, TTFT p{demand.percentile:g} <= {say_s(demand.ttft_s)}, TPOT p{demand.percentile:g} <="
        f" {say_s(demand.itl_s)}\n{gain(answer)}"
    )


def gain(answer: PlanAnswer) -> str:
    """Compare the best aggregated with the best disaggregated layout."""
    aggregated, disaggregated = answer.best_of(disaggregated=False), answer.best_of(disaggregated=True)
    if disaggregated is None and answer.question.demand.output_tokens == 1:
        return "disaggregated: a request has no second token to decode"
    if aggregated is None or disaggregated is None:
        missing = "aggregated" if aggregated is None else "disaggregated"
        return f"{missing}: no layout meets the targets on these devices"
    ratio = disaggregated.seen.rate_per_s / aggregated.seen.rate_per_s
    return f"disaggregated serving gives {ratio:.2f} times the rate of aggregated workers"


def name_layout(layout: Layout) -> str:
    """Format a layout as short text."""
    return " + ".join(map(_name_role_layout, layout.role_layouts))


def rows(answer: PlanAnswer) -> list[tuple[str, ...]]:
    """Give the rows of the ranked table, header first."""
    return [_HEAD, *(_row(answer, number, each) for number, each in enumerate(answer.proposals, start=1))]


def make_report(answer: PlanAnswer) -> dict[str, Any]:
    """Make the JSON report, as documented in docs/plan.md."""
    question = answer.question
    demand = question.demand
    return {
        "model": question.model,
        "hardware": question.hardware.name,
        "gpus": question.devices,
        "formats": dict(question.formats),
        "isl": demand.input_tokens,
        "osl": demand.output_tokens,
        "slo": question.slo.model_dump(),
        "layouts": [_figures(answer, proposal) for proposal in answer.proposals],
        "curve": [
            {
                "tokens_per_s_per_user": point.user_tokens_per_s,
                "aggregated_tokens_per_s_per_gpu": _tokens_per_s(answer, point.aggregated_per_s),
                "disaggregated_tokens_per_s_per_gpu": _tokens_per_s(answer, point.disaggregated_per_s),
            }
            for point in answer.curve
        ],
    }


def _figures(answer: PlanAnswer, proposal: Proposal) -> dict[str, Any]:
    seen, devices = proposal.seen, answer.question.devices
    return {
        "name": name_layout(proposal.layout),
        "kind": "disaggregated" if proposal.layout.is_disaggregated else "aggregated",
        "simulated": proposal.is_simulated,
        "gpus_used": proposal.layout.devices,
        "requests_per_s": seen.rate_per_s,
        "requests_per_s_per_gpu": seen.rate_per_s / devices,
        "tokens_per_s_per_gpu": _tokens_per_s(answer, seen.rate_per_s),
        "ttft_s": seen.ttft_s,
        "itl_s": seen.itl_s,
        "kv_headroom": 1 - seen.kv_share,
        "predicted_requests_per_s": proposal.layout.rate_per_s,
        "graph": graph_data(answer.question, proposal.layout),
    }


def _tokens_per_s(answer: PlanAnswer, rate_per_s: float) -> float:
    """Give output tokens per second and device, counting unused devices too."""
    return rate_per_s * answer.question.demand.output_tokens / answer.question.devices


def _row(answer: PlanAnswer, number: int, proposal: Proposal) -> tuple[str, ...]:
    seen, devices = proposal.seen, answer.question.devices
    return (
        str(number),
        name_layout(proposal.layout),
        str(proposal.layout.devices),
        f"{seen.rate_per_s:,.3g}",
        f"{seen.rate_per_s / devices:,.3g}",
        f"{_tokens_per_s(answer, seen.rate_per_s):,.3g}",
        say_s(seen.ttft_s),
        say_s(seen.itl_s),
        f"{1 - seen.kv_share:.0%}",
        "simulation" if proposal.is_simulated else "model alone",
    )


def _name_role_layout(role_layout: RoleLayout) -> str:
    return f"{role_layout.workers} {role_layout.role} ({parallel_name(role_layout.parallel)}, {role_layout.max_batch_tokens:,} tokens a step)"


_AGGREGATED, _DISAGGREGATED = 0, 1


def make_page(answer: PlanAnswer) -> str:
    """Make the page, one HTML file that opens offline."""
    heading, gained = describe(answer).split("\n")
    head, *body = rows(answer)
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in body)
    return make_document(
        heading,
        f'<p class="about">{html.escape(gained)}</p>{chart_grid([pareto(answer)])}'
        f'<h2>In numbers</h2><div class="table"><table><tr>{cells}</tr>{lines}</table></div>',
    )


def pareto(answer: PlanAnswer) -> Chart:
    """Chart tokens/s per device over tokens/s per user; dots are simulated layouts."""
    question = answer.question
    tokens = question.demand.output_tokens / question.devices
    dots = [
        Dots(
            np.array([1 / proposal.seen.itl_s]),
            np.array([proposal.seen.rate_per_s * tokens]),
            _DISAGGREGATED if proposal.layout.is_disaggregated else _AGGREGATED,
        )
        for proposal in answer.proposals
        if proposal.is_simulated and proposal.seen.itl_s > 0
    ]
    return Chart(
        "Output tokens/s a GPU over tokens/s a user",
        f"{question.model} on {question.devices} {question.hardware.name}: lines predicted, dots simulated",
        np.array([point.user_tokens_per_s for point in answer.curve]),
        [
            ChartLine(
                "aggregated", np.array([p.aggregated_per_s * tokens for p in answer.curve]), _AGGREGATED
            ),
            ChartLine(
                "disaggregated",
                np.array([p.disaggregated_per_s * tokens for p in answer.curve]),
                _DISAGGREGATED,
            ),
        ],
        unit="tokens/s",
        dots=dots,
        x_axis=XAxis.PLAIN,
    )
