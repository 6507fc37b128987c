"""The HTML report of one simulated deployment, or of several side by side."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.graph import Slo
from penstock.sim.charts import (
    COLOURS,
    Band,
    Chart,
    ChartLine,
    Points,
    XAxis,
    chart_grid,
    make_document,
    same_scale,
    say_s,
)
from penstock.sim.deployment import RoleGroup, SimDeployment
from penstock.sim.report import (
    Report,
    SummaryRow,
    is_good,
    latencies_s,
    summarize,
    total_counts,
    worker_counts,
)
from penstock.sim.simulate import Recording, Samples

_POINTS = 240
_WINDOWS = 60
_SMOOTHED = 20
"""Moving ratios use a window of 1/20 of the run, to smooth single requests."""


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """A simulated deployment with its recording and report."""

    name: str
    deployment: SimDeployment
    recording: Recording
    report: Report

    @property
    def samples(self) -> Samples:
        assert self.recording.samples is not None, "recorded with a sample interval"
        return self.recording.samples

    @property
    def slo(self) -> Slo | None:
        return self.deployment.graph.slo


def worker_charts(run: SimulationRun) -> list[Chart]:
    """Chart each worker, or percentiles over workers if there are many."""
    samples = run.samples
    hits, computed = samples.of("prefix_hit_tokens"), samples.of("prefilled_tokens")
    return [
        _by_worker("Queue", "requests that wait", samples, samples.of("waiting_requests"), "requests"),
        _by_worker("Running", "requests in the batch", samples, samples.of("running_requests"), "requests"),
        _by_worker("KV in use", "share of blocks that requests hold", samples, _kv_use(samples), "%"),
        _by_worker(
            "Cache hits",
            "share of prompt tokens found in the cache",
            samples,
            _moving_ratio(hits, computed),
            "%",
        ),
    ]


def overall_charts(runs: Sequence[SimulationRun]) -> list[Chart]:
    """Chart rates and latencies of all requests, one line per deployment."""
    return [*_distributions(runs), _ttft_over_time(runs), *_rates(runs)]


def total_charts(runs: Sequence[SimulationRun]) -> list[Chart]:
    """Chart the quantities of `worker_charts` over all workers, one line per deployment."""
    end_s = max(run.recording.end_s for run in runs)
    xs = np.linspace(0, end_s, _POINTS)

    def chart(title: str, note: str, series: list[Points], unit: str) -> Chart:
        lines = []
        for number, (run, values) in enumerate(zip(runs, series, strict=True)):
            at_s = np.asarray(run.samples.at_s)
            ys = np.interp(xs, at_s, values, right=np.nan) if len(at_s) else np.full(len(xs), np.nan)
            lines.append(ChartLine(run.name, ys, number % COLOURS))
        return Chart(title, note, xs, lines, unit=unit, y_max=1.0 if unit == "%" else 0.0)

    def total(run: SimulationRun, name: str) -> Points:
        summed: Points = np.nansum(run.samples.of(name), axis=1)
        return summed

    waiting, running = ([total(run, f"{name}_requests") for run in runs] for name in ("waiting", "running"))
    ratios = [_moving_ratio(total(run, "prefix_hit_tokens"), total(run, "prefilled_tokens")) for run in runs]
    kv_use = [
        np.nansum(run.samples.of("active_blocks"), axis=1) / np.maximum(total(run, "total_blocks"), 1)
        for run in runs
    ]
    return [
        chart("Queue", "requests that wait, all workers", waiting, "requests"),
        chart("Running", "requests in batches, all workers", running, "requests"),
        chart("KV in use", "share of all blocks that requests hold", kv_use, "%"),
        chart("Cache hits", "share of prompt tokens found in a cache", ratios, "%"),
    ]


def scaling_charts(runs: Sequence[SimulationRun]) -> list[Chart]:
    """Chart how many workers there are: by role of one deployment, else one line per deployment; none if none was scaled."""
    if all(run.recording.scaling is None for run in runs):
        return []
    if len(runs) == 1:
        return [worker_counts(runs[0].recording, runs[0].deployment)]
    return [total_counts({run.name: (run.recording, run.deployment) for run in runs})]


def _by_worker(title: str, note: str, samples: Samples, values: Points, unit: str) -> Chart:
    xs = np.asarray(samples.at_s)
    y_max = 1.0 if unit == "%" else 0.0
    if len(samples.workers) <= COLOURS:
        lines = [ChartLine(name, values[:, column], column) for name, column in samples.workers.items()]
        return Chart(title, f"{note}, by worker", xs, lines, unit=unit, y_max=y_max)
    some = np.isfinite(values).any(axis=1)
    percentiles = np.full((5, len(xs)), np.nan)
    if some.any():
        percentiles[:, some] = np.nanpercentile(values[some], (0, 10, 50, 90, 100), axis=1)
    least, low, median, high, most = percentiles
    bands = [Band("all", least, most), Band("80 % of workers", low, high)]
    roles = sorted(set(samples.roles.values()))
    if len(roles) > 1:
        mine = {role: values[:, samples.columns_of(role)] for role in roles}
        medians = {role: _median(some_values) for role, some_values in mine.items()}
        lines = [
            ChartLine(f"median {role} worker", ys, number)
            for number, (role, ys) in enumerate(medians.items())
        ]
    else:
        lines = [ChartLine("median worker", median)]
    return Chart(
        title, f"{note}, of {len(samples.workers):,} workers", xs, lines, bands, unit=unit, y_max=y_max
    )


def _median(values: Points) -> Points:
    """Give the median over workers of (times, workers) as (times,); NaN without workers."""
    median = np.full(len(values), np.nan)
    some = np.isfinite(values).any(axis=1)
    median[some] = np.nanmedian(values[some], axis=1)
    return median


def _kv_use(samples: Samples) -> Points:
    used: Points = samples.of("active_blocks") / samples.of("total_blocks")
    return used


def _moving_ratio(hits: Points, others: Points) -> Points:
    """Give hits / (hits + others) over a moving window, from counters; NaN without events."""
    back = max(len(hits) // _SMOOTHED, 1)
    gained = []
    for counter in (hits, others):
        before = np.concatenate([np.zeros_like(counter[:back]), counter[:-back]])[: len(counter)]
        gained.append(np.maximum(counter - before, 0.0))
    total = gained[0] + gained[1]
    ratio: Points = np.divide(gained[0], total, out=np.full_like(total, np.nan), where=total > 0)
    return ratio


def _rates(runs: Sequence[SimulationRun]) -> list[Chart]:
    edges = np.linspace(0, max([run.recording.end_s for run in runs] + [1e-9]), _WINDOWS + 1)
    window_s, middles = edges[1], (edges[:-1] + edges[1:]) / 2

    def per_s(run: SimulationRun, weights: Points) -> Points:
        rates: Points = (
            np.histogram(np.asarray(run.recording.last_token_s), edges, weights=weights)[0] / window_s
        )
        return rates

    def good(run: SimulationRun) -> Points:
        ones = np.ones(len(run.recording.last_token_s))
        return per_s(run, ones if run.slo is None else is_good(run.recording, run.slo).astype(np.float64))

    lines = [ChartLine(run.name, good(run), number % COLOURS) for number, run in enumerate(runs)]
    bands = []
    if len(runs) == 1:
        completed = per_s(runs[0], np.ones(len(runs[0].recording.last_token_s)))
        lines = [replace(lines[0], name="within both targets")] if runs[0].slo is not None else []
        bands = [Band("completed", np.zeros_like(completed), completed)]
    tokens = [
        ChartLine(
            run.name, per_s(run, np.asarray(run.recording.output_tokens, dtype=np.float64)), number % COLOURS
        )
        for number, run in enumerate(runs)
    ]
    goodput = "requests a second that end within both targets"
    return [
        Chart("Goodput", goodput, middles, lines, bands, unit="requests/s"),
        Chart("Output", "tokens a second, of answers when they end", middles, tokens, unit="tokens/s"),
    ]


def _ttft_over_time(runs: Sequence[SimulationRun]) -> Chart:
    """Chart TTFT over send time: p50 and p90 of one deployment, p90 of several."""
    edges = np.linspace(
        0, max([max(run.recording.sent_s, default=0.0) for run in runs] + [1e-9]), _WINDOWS + 1
    )
    percentiles = (50, 90) if len(runs) == 1 else (90,)
    lines: list[ChartLine] = []
    for run in runs:
        ttft_s, _, _ = latencies_s(run.recording)
        windows = (
            np.clip(np.searchsorted(edges, np.asarray(run.recording.sent_s), side="right"), 1, _WINDOWS) - 1
        )
        order = np.argsort(windows, kind="stable")
        parts = np.split(ttft_s[order], np.searchsorted(windows[order], np.arange(1, _WINDOWS)))
        for percent in percentiles:
            ys = np.array([np.percentile(part, percent) if len(part) else np.nan for part in parts])
            name = f"p{percent}" if len(runs) == 1 else run.name
            lines.append(ChartLine(name, ys, len(lines) % COLOURS))
    note = (
        "seconds, p90 by when requests were sent" if len(runs) > 1 else "seconds, by when requests were sent"
    )
    return Chart("Time to first token over time", note, (edges[:-1] + edges[1:]) / 2, lines, unit="s")


def _distributions(runs: Sequence[SimulationRun]) -> list[Chart]:
    charts = []
    slo = runs[0].slo if all(run.slo == runs[0].slo for run in runs) else None
    for title, number, target_s in (
        ("Time to first token", 0, None if slo is None else slo.ttft_s),
        ("Time between tokens", 1, None if slo is None else slo.itl_s),
        ("End to end", 2, None),
    ):
        values = [np.sort(_latency_s(run, number)) for run in runs]
        some = np.concatenate(values)
        xs = (
            np.geomspace(max(some.min(), 1e-6), max(some.max(), 2e-6), _POINTS) if len(some) else np.array([])
        )
        lines = [
            ChartLine(
                run.name, np.searchsorted(found, xs, side="right") / max(len(found), 1), index % COLOURS
            )
            for index, (run, found) in enumerate(zip(runs, values, strict=True))
        ]
        charts.append(
            Chart(
                title, "share of requests that took at most so long", xs, lines,
                unit="%", y_max=1.0, x_axis=XAxis.LOG_TIME, mark_s=target_s,
            )
        )  # fmt: skip
    return charts


def _latency_s(run: SimulationRun, number: int) -> Points:
    """Give one latency of every completed request; requests with one token have no ITL."""
    values: Points = latencies_s(run.recording)[number]
    return values[np.asarray(run.recording.output_tokens) > 1] if number == 1 else values


_TILES = ("TTFT, p50", "TTFT, p99", "TPOT, p50", "goodput", "output", "KV hit ratio", "energy", "cost")
_PAIR_WIDTH_PX = 380


def make_page(heading: str, runs: Sequence[SimulationRun]) -> str:
    """Make the page.

    Args:
        heading: workload and deployments.
        runs: the runs; several are shown side by side.
    """
    rows = summarize([run.report for run in runs])
    body = _one(runs[0], rows) if len(runs) == 1 else _several(runs, rows)
    return make_document(heading, body)


def _one(run: SimulationRun, rows: list[SummaryRow]) -> str:
    tiles = "".join(
        f'<div class="tile"><small>{row.name}</small><b>{row.cells[0].value}</b> {row.unit}</div>'
        for row in rows
        if row.name in _TILES
    )
    return (
        f'<p class="about">{_about(run)}</p><div class="tiles">{tiles}</div>'
        f"<h2>Workers over time</h2>{chart_grid([*scaling_charts([run]), *worker_charts(run)])}"
        f"<h2>What users see</h2>{chart_grid(overall_charts([run]))}"
        f"<h2>In numbers</h2>{_table(rows, [])}"
    )


def _several(runs: Sequence[SimulationRun], rows: list[SummaryRow]) -> str:
    about = "".join(f'<p class="about"><b>{html.escape(run.name)}</b>: {_about(run)}</p>' for run in runs)
    together = [*scaling_charts(runs), *overall_charts(runs), *total_charts(runs)]
    columns = "".join(f"<h3>{html.escape(run.name)}</h3>" for run in runs)
    for kind in zip(*(worker_charts(run) for run in runs), strict=True):
        columns += "".join(chart.to_html() for chart in same_scale(kind))
    style = f"grid-template-columns:repeat({len(runs)},minmax({_PAIR_WIDTH_PX}px,1fr))"
    return (
        f"{about}<h2>In numbers</h2>{_table(rows, [run.name for run in runs])}"
        f"<h2>Together</h2>{chart_grid(together)}"
        f'<h2>Workers over time, side by side</h2><div class="pairs" style="{style}">{columns}</div>'
    )


def _about(run: SimulationRun) -> str:
    graph, deployment = run.deployment.graph, run.deployment
    slo = "" if run.slo is None else f", targets: TTFT {say_s(run.slo.ttft_s)}, TPOT {say_s(run.slo.itl_s)}"
    yields = [role_group.spec.tokens_per_step for role_group in deployment.decoding]
    speculation = "" if max(yields) == 1 else f", {max(yields):g} tokens a decode step"
    link = f"; {deployment.link}" if deployment.link else ""
    return html.escape(
        f"{graph.model} on {_devices(deployment.role_groups)}, policy {graph.router.policy},"
        f" blocks of {graph.block_size} tokens{speculation}{slo}; {deployment.expenses}{link}"
    )


def _devices(role_groups: Sequence[RoleGroup]) -> str:
    """Format the devices of each role."""
    if len(role_groups) == 1:
        return f"{role_groups[0].devices:,} {role_groups[0].hardware.name}"
    return " and ".join(
        f"{role_group.spec.replicas:,} {role_group.role} workers of {role_group.spec.devices} {role_group.hardware.name}"
        for role_group in role_groups
    )


def _table(rows: list[SummaryRow], names: list[str]) -> str:
    head = (
        f"<tr><th></th><th></th>{''.join(f'<th>{html.escape(name)}</th>' for name in names)}</tr>"
        if names
        else ""
    )
    body = ""
    for row in rows:
        body += f"<tr><td>{html.escape(row.name)}</td><td>{row.unit}</td>"
        for cell in row.cells:
            difference = f"<small>{cell.difference}</small>" if names else ""
            best = ' class="best"' if cell.is_best else ""
            body += f"<td{best}>{'★ ' if cell.is_best else ''}{cell.value}{difference}</td>"
        body += "</tr>"
    return f'<div class="table"><table>{head}{body}</table></div>'
