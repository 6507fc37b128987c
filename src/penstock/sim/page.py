"""A simulation's report as one HTML file that needs nothing else: no script, no network."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import WorkerLoad
from penstock.graph import Slo
from penstock.sim.charts import Chart, Line, make_html
from penstock.sim.report import is_good, latencies_s, rows
from penstock.sim.simulate import Recording, Samples

_LINES_MAX = 8
_POINTS = 200
_WINDOWS = 60


def make_page(title: str, report: dict[str, Any], recording: Recording, slo: Slo | None) -> str:
    """Write the page.

    Args:
        title: what was played on what.
        report: as `make_report` gives it.
        recording: with samples.
        slo: its targets are marked, None for no goodput.
    """
    assert recording.samples is not None, "recorded with a sample interval"
    charts = [*_over_time(recording.samples), *_distributions(recording, slo), *_goodput(recording, slo)]
    return make_html(title, charts, [("In numbers", rows(report))])


def _over_time(samples: Samples) -> list[Chart]:
    """Show each worker where they are few, and the least, mean and most of them where they are many."""

    def chart(title: str, column: Any, y_max: float | None = None) -> Chart:
        values = {name: [column(load) for load in loads] for name, loads in samples.loads.items()}
        if len(values) > _LINES_MAX:
            table = np.array(list(values.values()))
            values = {"least": list(table.min(0)), "mean": list(table.mean(0)), "most": list(table.max(0))}
        lines = [Line(name, samples.at_s, ys) for name, ys in values.items()]
        return Chart(title, "seconds", lines, y_max=y_max)

    return [
        chart("Requests waiting", lambda load: load.waiting_requests),
        chart("Requests running", lambda load: load.running_requests),
        chart("KV blocks in use", lambda load: load.active_blocks / load.total_blocks, y_max=1.0),
        _hit_ratio(samples),
    ]


def _hit_ratio(samples: Samples) -> Chart:
    def total(column: Any) -> NDArray[np.int64]:
        loads: list[list[WorkerLoad]] = list(samples.loads.values())
        return np.array([sum(column(worker[i]) for worker in loads) for i in range(len(samples.at_s))])

    hits = np.diff(total(lambda load: load.prefix_hit_tokens), prepend=0)
    computed = np.diff(total(lambda load: load.prefilled_tokens), prepend=0)
    ratio = hits / np.maximum(hits + computed, 1)
    return Chart(
        "Prompt tokens found in the cache", "seconds", [Line("share", samples.at_s, list(ratio))], y_max=1.0
    )


def _distributions(recording: Recording, slo: Slo | None) -> list[Chart]:
    ttft_s, itl_s, _ = latencies_s(recording)
    shares = np.linspace(0, 1, _POINTS)
    charts = []
    for title, values, target in (
        ("Time to first token", ttft_s, None if slo is None else slo.ttft_s),
        ("Time between tokens", itl_s, None if slo is None else slo.itl_s),
    ):
        xs = np.quantile(values, shares) if len(values) else shares
        charts.append(
            Chart(
                f"{title}: share of requests at most so long",
                "seconds",
                [Line("requests", list(xs), list(shares))],
                y_max=1.0,
                mark_x=target,
            )
        )
    return charts


def _goodput(recording: Recording, slo: Slo | None) -> list[Chart]:
    edges = np.linspace(0, max(recording.end_s, 1e-9), _WINDOWS + 1)
    window_s = edges[1] - edges[0]
    ended = np.asarray(recording.last_token_s)
    middles = list((edges[:-1] + edges[1:]) / 2)
    lines = [Line("completed", middles, list(np.histogram(ended, edges)[0] / window_s))]
    if slo is not None:
        good = np.histogram(ended[is_good(recording, slo)], edges)[0] / window_s
        lines.append(Line("within both targets", middles, list(good)))
    return [Chart("Requests a second", "seconds", lines)]
