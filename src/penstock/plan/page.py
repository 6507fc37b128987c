"""The HTML page of an answer: curve of tokens/s per user against tokens/s per GPU, and ranked table."""

import html

import numpy as np

from penstock.plan.answer import Answer
from penstock.plan.report import describe, rows
from penstock.sim.report.charts import Chart, Dots, Line, XAxis
from penstock.sim.report.document import chart_grid, make_document

_AGGREGATED, _DISAGGREGATED = 0, 1


def make_page(answer: Answer) -> str:
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


def pareto(answer: Answer) -> Chart:
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
            Line("aggregated", np.array([p.aggregated_per_s * tokens for p in answer.curve]), _AGGREGATED),
            Line(
                "disaggregated",
                np.array([p.disaggregated_per_s * tokens for p in answer.curve]),
                _DISAGGREGATED,
            ),
        ],
        unit="tokens/s",
        dots=dots,
        x_axis=XAxis.PLAIN,
    )
