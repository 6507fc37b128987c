"""The charts of a report, from recordings of one deployment or several."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.graph import Slo
from penstock.sim.deployment import Deployment
from penstock.sim.report.charts import COLOURS, Band, Chart, Line, Points, XAxis
from penstock.sim.report.report import is_good, latencies_s
from penstock.sim.report.scaling_report import total_counts, worker_counts
from penstock.sim.report.summary import Report
from penstock.sim.simulate import Recording, Samples

_POINTS = 240
_WINDOWS = 60
_SMOOTHED = 20
"""Moving ratios use a window of 1/20 of the run, to smooth single requests."""


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated deployment with its recording and report."""

    name: str
    deployment: Deployment
    recording: Recording
    report: Report

    @property
    def samples(self) -> Samples:
        assert self.recording.samples is not None, "recorded with a sample interval"
        return self.recording.samples

    @property
    def slo(self) -> Slo | None:
        return self.deployment.graph.slo


def worker_charts(run: Run) -> list[Chart]:
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


def overall_charts(runs: Sequence[Run]) -> list[Chart]:
    """Chart rates and latencies of all requests, one line per deployment."""
    return [*_distributions(runs), _ttft_over_time(runs), *_rates(runs)]


def total_charts(runs: Sequence[Run]) -> list[Chart]:
    """Chart the quantities of `worker_charts` over all workers, one line per deployment."""
    end_s = max(run.recording.end_s for run in runs)
    xs = np.linspace(0, end_s, _POINTS)

    def chart(title: str, note: str, series: list[Points], unit: str) -> Chart:
        lines = []
        for number, (run, values) in enumerate(zip(runs, series, strict=True)):
            at_s = np.asarray(run.samples.at_s)
            ys = np.interp(xs, at_s, values, right=np.nan) if len(at_s) else np.full(len(xs), np.nan)
            lines.append(Line(run.name, ys, number % COLOURS))
        return Chart(title, note, xs, lines, unit=unit, y_max=1.0 if unit == "%" else 0.0)

    def total(run: Run, name: str) -> Points:
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


def scaling_charts(runs: Sequence[Run]) -> list[Chart]:
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
        lines = [Line(name, values[:, column], column) for name, column in samples.workers.items()]
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
            Line(f"median {role} worker", ys, number) for number, (role, ys) in enumerate(medians.items())
        ]
    else:
        lines = [Line("median worker", median)]
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


def _rates(runs: Sequence[Run]) -> list[Chart]:
    edges = np.linspace(0, max([run.recording.end_s for run in runs] + [1e-9]), _WINDOWS + 1)
    window_s, middles = edges[1], (edges[:-1] + edges[1:]) / 2

    def per_s(run: Run, weights: Points) -> Points:
        rates: Points = (
            np.histogram(np.asarray(run.recording.last_token_s), edges, weights=weights)[0] / window_s
        )
        return rates

    def good(run: Run) -> Points:
        ones = np.ones(len(run.recording.last_token_s))
        return per_s(run, ones if run.slo is None else is_good(run.recording, run.slo).astype(np.float64))

    lines = [Line(run.name, good(run), number % COLOURS) for number, run in enumerate(runs)]
    bands = []
    if len(runs) == 1:
        completed = per_s(runs[0], np.ones(len(runs[0].recording.last_token_s)))
        lines = [replace(lines[0], name="within both targets")] if runs[0].slo is not None else []
        bands = [Band("completed", np.zeros_like(completed), completed)]
    tokens = [
        Line(
            run.name, per_s(run, np.asarray(run.recording.output_tokens, dtype=np.float64)), number % COLOURS
        )
        for number, run in enumerate(runs)
    ]
    goodput = "requests a second that end within both targets"
    return [
        Chart("Goodput", goodput, middles, lines, bands, unit="requests/s"),
        Chart("Output", "tokens a second, of answers when they end", middles, tokens, unit="tokens/s"),
    ]


def _ttft_over_time(runs: Sequence[Run]) -> Chart:
    """Chart TTFT over send time: p50 and p90 of one deployment, p90 of several."""
    edges = np.linspace(
        0, max([max(run.recording.sent_s, default=0.0) for run in runs] + [1e-9]), _WINDOWS + 1
    )
    percentiles = (50, 90) if len(runs) == 1 else (90,)
    lines: list[Line] = []
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
            lines.append(Line(name, ys, len(lines) % COLOURS))
    note = (
        "seconds, p90 by when requests were sent" if len(runs) > 1 else "seconds, by when requests were sent"
    )
    return Chart("Time to first token over time", note, (edges[:-1] + edges[1:]) / 2, lines, unit="s")


def _distributions(runs: Sequence[Run]) -> list[Chart]:
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
            Line(run.name, np.searchsorted(found, xs, side="right") / max(len(found), 1), index % COLOURS)
            for index, (run, found) in enumerate(zip(runs, values, strict=True))
        ]
        charts.append(
            Chart(
                title, "share of requests that took at most so long", xs, lines,
                unit="%", y_max=1.0, x_axis=XAxis.LOG_TIME, mark_s=target_s,
            )
        )  # fmt: skip
    return charts


def _latency_s(run: Run, number: int) -> Points:
    """Give one latency of every completed request; requests with one token have no ITL."""
    values: Points = latencies_s(run.recording)[number]
    return values[np.asarray(run.recording.output_tokens) > 1] if number == 1 else values
