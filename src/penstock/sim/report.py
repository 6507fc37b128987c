"""The report of a simulated run as JSON, and the rows of the table that compares reports."""

import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import Tier
from penstock.core.types.instances import Role
from penstock.graph import Graph, Slo
from penstock.sim.charts import COLOURS, Chart, ChartLine, Points
from penstock.sim.deployment import RoleGroup, SimDeployment, plan_deployment
from penstock.sim.scaling import START_S, RoleCount, ScalingRecord
from penstock.sim.simulate import Recording, Samples, simulate
from penstock.sim.workload import SimSession

_PERCENTILES = (50, 90, 99)


def percentiles(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Give `mean`, `p50`, `p90` and `p99`; None for an empty array."""
    found: dict[str, float | None] = {"mean": float(values.mean()) if len(values) else None}
    for percent in _PERCENTILES:
        found[f"p{percent}"] = float(np.percentile(values, percent)) if len(values) else None
    return found


def ratio(numerator: float, denominator: float) -> float | None:
    """Divide; None if the denominator is 0."""
    return numerator / denominator if denominator else None


def report_roles(recording: Recording, deployment: SimDeployment) -> dict[str, Any]:
    """Make the section of each role; values over time are None without samples."""
    return {
        role_group.role.value: _report_role(recording, role_group) for role_group in deployment.role_groups
    }


def _report_role(recording: Recording, role_group: RoleGroup) -> dict[str, Any]:
    counters = recording.counters[role_group.role]
    return {
        "workers": role_group.spec.replicas,
        "devices": role_group.devices,
        "hardware": role_group.hardware.name,
        "kv_tokens": role_group.num_blocks * role_group.block_size,
        "prefilled_tokens": counters.prefilled_tokens,
        "generated_tokens": counters.generated_tokens,
        "kv_hit_ratio": ratio(
            counters.prefix_hit_tokens, counters.prefix_hit_tokens + counters.prefilled_tokens
        ),
        "preemptions": counters.preemptions,
        "received_bytes": counters.received_bytes,
        **_over_time(recording.samples, role_group.role),
    }


def _over_time(samples: Samples | None, role: Role) -> dict[str, Any]:
    names = ("waiting_requests", "running_requests", "kv_use")
    if samples is None or not samples.at_s:
        return dict.fromkeys(names)
    columns = samples.columns_of(role)
    waiting, running, active, total = (
        samples.of(name)[:, columns]
        for name in ("waiting_requests", "running_requests", "active_blocks", "total_blocks")
    )
    return dict(zip(names, map(_mean_and_max, (waiting, running, active / total)), strict=True))


def _mean_and_max(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Give mean and maximum over all workers and times."""
    known = values[np.isfinite(values)]
    if not len(known):
        return {"mean": None, "max": None}
    return {"mean": float(known.mean()), "max": float(known.max())}


def report_kv_transfer(recording: Recording, deployment: SimDeployment) -> dict[str, Any] | None:
    """Make the section of KV transfers; None without prefill workers."""
    if len(deployment.decoding) == len(deployment.role_groups):
        return None
    second_s = np.asarray(recording.second_token_s) - np.asarray(recording.first_token_s)
    is_remote = np.isfinite(second_s)
    by_role = recording.counters.values()
    failures: dict[str, int] = {}
    for counters in by_role:
        for code, times in counters.failures.items():
            failures[code] = failures.get(code, 0) + times
    return {
        "remote": int(is_remote.sum()),
        "local": len(second_s) - int(is_remote.sum()),
        "bytes": sum(counters.received_bytes for counters in by_role),
        "second_token_s": percentiles(second_s[is_remote]),
        "failures": dict(sorted(failures.items())),
        "expired": sum(counters.expired for counters in by_role),
        "refused": sum(counters.refused for counters in by_role),
    }


_POINTS = 400


def report_scaling(recording: Recording, deployment: SimDeployment) -> dict[str, Any] | None:
    """Make the section; None where nothing scaled the workers."""
    record, end_s = recording.scaling, recording.end_s
    if record is None:
        return None
    return {
        "changes": {change: record.changes[change] for change in ("add", "retire", "flip")},
        "turns": record.turns,
        "rounds": dict(sorted(record.rounds.items())),
        "roles": {
            group.role.value: {
                "ready_mean": record.mean(group.role, end_s),
                "ready_min": min(_ready(record, group.role), default=0),
                "ready_max": max(_ready(record, group.role), default=0),
                "worker_hours": record.worker_s.get(group.role, 0.0) / 3600,
            }
            for group in deployment.role_groups
        },
        "workers": [
            {"at_s": at_s} | {role.value: count._asdict() for role, count in counts.items()}
            for at_s, counts in record.counts
        ],
        "decisions": [{"at_s": at_s, "what": found.explain()} for at_s, found in record.decisions],
    }


def _ready(record: ScalingRecord, role: Role) -> list[int]:
    return [counts.get(role, RoleCount()).ready for _, counts in record.counts]


def worker_counts(recording: Recording, deployment: SimDeployment) -> Chart:
    """Chart the workers of each role over time, of a deployment that was scaled."""
    record = recording.scaling
    assert record is not None, "scaled"
    xs = np.linspace(0, max(recording.end_s, 1e-9), _POINTS)
    lines = []
    for number, group in enumerate(deployment.role_groups):
        role = group.role
        held = _steps(record, xs, role, is_ready=False)
        lines += [
            ChartLine(role.value, _steps(record, xs, role, is_ready=True), number),
            ChartLine(f"{role}, with those that start or drain", held, number + COLOURS // 2),
        ]
    return Chart("Workers", "workers that serve, by role", xs, lines, unit="workers")


def total_counts(runs: Mapping[str, tuple[Recording, SimDeployment]]) -> Chart:
    """Chart the workers of all roles over time, one line per deployment."""
    xs = np.linspace(0, max([recording.end_s for recording, _ in runs.values()] + [1e-9]), _POINTS)
    lines = []
    for number, (name, (recording, deployment)) in enumerate(runs.items()):
        record, groups = recording.scaling, deployment.role_groups
        if record is None:
            ys = np.full(len(xs), float(sum(group.spec.replicas for group in groups)))
        else:
            ys = np.sum([_steps(record, xs, group.role, is_ready=False) for group in groups], axis=0)
        lines.append(ChartLine(name, np.where(xs <= recording.end_s, ys, np.nan), number % COLOURS))
    return Chart("Workers", "workers that hold devices", xs, lines, unit="workers")


def _steps(record: ScalingRecord, xs: Points, role: Role, *, is_ready: bool) -> Points:
    """Give the workers of a role at each of `xs`."""
    at_s = np.asarray([at_s for at_s, _ in record.counts])
    counts = [entry.get(role, RoleCount()) for _, entry in record.counts]
    values = np.asarray([count.ready if is_ready else count.present for count in counts], dtype=np.float64)
    found: Points = values[np.maximum(np.searchsorted(at_s, xs, side="right") - 1, 0)]
    return found


_HOUR_S = 3600.0


def make_report(
    recording: Recording, deployment: SimDeployment, slo: Slo | None, *, wall_s: float
) -> dict[str, Any]:
    """Make the report of a recording.

    Keys have their unit in the name; a value without data is None:
    `requests`, `completed`, `failed`; `duration_s` from the first request to the last one's end;
    `ttft_s`, `itl_s` (mean time between a request's tokens) and `e2e_s`, each with `mean`, `p50`, `p90`, `p99`;
    `output_tokens_per_s`; `goodput_rps`, requests per second that meet both targets, and `slo_attainment`, their share of all
    requests, failed ones included;
    `kv_hit_ratio`, cached prompt tokens / prompt tokens; `kv_hit_ratio_by_tier`, the same by tier of the hit;
    `tenants`, by name if requests have one, each with `requests`, `failed`, `ttft_s`, `prompt_token_share` and
    `output_token_share` (fractions of the completed tokens);
    `roles`, by name: counters of its workers, and queue and KV use over time if sampled;
    `kv_transfer`: requests with remote (`remote`) and local (`local`) prefill, bytes moved, time from first to second token
    of remote ones, and failures; None without prefill workers;
    `scaling`: workers over time, changes and decisions; None where nothing scaled them;
    `gpu_hours`; `tokens_per_joule` and `usd_per_million_tokens`, per output token at the hardware's power and price;
    `wall`, real time of this run, not reproducible.

    Args:
        recording: recording of one run.
        deployment: the simulated deployment.
        slo: targets of goodput; None for no goodput.
        wall_s: real seconds of the run.
    """
    tokens = np.asarray(recording.output_tokens)
    ttft_s, itl_s, e2e_s = latencies_s(recording)
    duration_s = recording.end_s
    prompt_tokens = int(np.asarray(recording.prompt_tokens).sum())
    output_tokens = int(tokens.sum())
    worker_s = {group.role: group.spec.replicas * duration_s for group in deployment.role_groups}
    if recording.scaling is not None:
        worker_s = {role: recording.scaling.worker_s.get(role, 0.0) for role in worker_s}
    device_s = [
        (group.spec.devices * worker_s[group.role], group.hardware) for group in deployment.role_groups
    ]
    joules = sum(seconds * hardware.watts for seconds, hardware in device_s)
    usd = sum(seconds * hardware.usd_per_hour for seconds, hardware in device_s) / _HOUR_S
    good = None if slo is None else int(is_good(recording, slo).sum())
    return {
        "requests": recording.requests,
        "completed": len(tokens),
        "failed": recording.failed,
        "duration_s": duration_s,
        "ttft_s": percentiles(ttft_s),
        "itl_s": percentiles(itl_s[tokens > 1]),
        "e2e_s": percentiles(e2e_s),
        "output_tokens_per_s": ratio(output_tokens, duration_s),
        "goodput_rps": None if good is None else ratio(good, duration_s),
        "slo_attainment": None if good is None else ratio(good, recording.requests),
        "kv_hit_ratio": ratio(int(np.asarray(recording.cached_tokens).sum()), prompt_tokens),
        "kv_hit_ratio_by_tier": _hit_ratios(recording, deployment, prompt_tokens),
        "tenants": _by_tenant(recording, ttft_s),
        "roles": report_roles(recording, deployment),
        "kv_transfer": report_kv_transfer(recording, deployment),
        "scaling": report_scaling(recording, deployment),
        "gpu_hours": sum(seconds for seconds, _ in device_s) / _HOUR_S,
        "tokens_per_joule": ratio(output_tokens, joules),
        "usd_per_million_tokens": ratio(1e6 * usd, output_tokens),
        "wall": {
            "seconds": wall_s,
            "requests_per_s": ratio(recording.requests, wall_s),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
    }


def _hit_ratios(
    recording: Recording, deployment: SimDeployment, prompt_tokens: int
) -> dict[str, float | None]:
    """Split the hit ratio by tier; None for tiers that no worker has."""
    device, *lower = Tier
    there = {device, *(kind.tier for role_group in deployment.role_groups for kind in role_group.lower_tiers)}
    found = dict(zip(lower, recording.onboarded_tokens, strict=False))
    found[device] = int(np.asarray(recording.cached_tokens).sum()) - sum(found.values())
    return {tier: ratio(found[tier], prompt_tokens) if tier in there else None for tier in Tier}


def _by_tenant(recording: Recording, ttft_s: NDArray[np.float64]) -> dict[str, Any]:
    asked = np.asarray(recording.tenants, dtype=np.str_)
    prompt_tokens, output_tokens = np.asarray(recording.prompt_tokens), np.asarray(recording.output_tokens)
    tenants = {}
    for name in sorted({*recording.tenants, *recording.failed_of} - {""}):
        mine, failed = asked == name, recording.failed_of.get(name, 0)
        tenants[name] = {
            "requests": int(mine.sum()) + failed,
            "failed": failed,
            "ttft_s": percentiles(ttft_s[mine]),
            "prompt_token_share": ratio(int(prompt_tokens[mine].sum()), int(prompt_tokens.sum())),
            "output_token_share": ratio(int(output_tokens[mine].sum()), int(output_tokens.sum())),
        }
    return tenants


def latencies_s(
    recording: Recording,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Give (TTFT, mean ITL, end-to-end time) of every completed request; ITL is 0 for one token."""
    times = (recording.sent_s, recording.first_token_s, recording.last_token_s)
    sent, first, last = (np.asarray(a) for a in times)
    gaps = np.asarray(recording.output_tokens) - 1
    return first - sent, np.where(gaps > 0, (last - first) / np.maximum(gaps, 1), 0.0), last - sent


def is_good(recording: Recording, slo: Slo) -> NDArray[np.bool_]:
    """Give (completed,) bool: whether each request met both targets."""
    ttft_s, itl_s, _ = latencies_s(recording)
    met: NDArray[np.bool_] = (ttft_s <= slo.ttft_s) & (itl_s <= slo.itl_s)
    return met


Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SummaryCell:
    """One value of one report.

    difference: percent from the first report; empty without a comparison
    is_best:    best of all reports, if these differ
    """

    value: str
    difference: str = ""
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One value of all reports, in one unit."""

    name: str
    unit: str
    cells: tuple[SummaryCell, ...]


@dataclass(frozen=True, slots=True)
class _Figure:
    """One table row: path of the value in the report, unit, and whether more (1) or less (-1) is better, or neither (0).

    An optional row is left out if no report has lower tiers.
    """

    name: str
    path: tuple[str, ...]
    unit: str
    better: int = 0
    is_optional: bool = False


_LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "itl_s"), ("end to end", "e2e_s"))
_FIGURES = (
    _Figure("requests", ("requests",), ""),
    _Figure("completed", ("completed",), "", 1),
    _Figure("failed", ("failed",), "", -1),
    _Figure("duration", ("duration_s",), "s"),
    *(
        _Figure(f"{name}, {part}", (key, part), "s", -1)
        for name, key in _LATENCIES
        for part in ("mean", "p50", "p90", "p99")
    ),
    _Figure("output", ("output_tokens_per_s",), "tokens/s", 1),
    _Figure("goodput", ("goodput_rps",), "requests/s", 1),
    _Figure("SLO attainment", ("slo_attainment",), "%", 1),
    _Figure("KV hit ratio", ("kv_hit_ratio",), "%", 1),
    *(_Figure(f"of it, on {tier}", ("kv_hit_ratio_by_tier", tier), "%", is_optional=True) for tier in Tier),
    _Figure("GPU time", ("gpu_hours",), "GPU-hours", -1),
    _Figure("energy", ("tokens_per_joule",), "tokens/J", 1),
    _Figure("cost", ("usd_per_million_tokens",), "USD/1M tokens", -1),
    _Figure("simulated in", ("wall", "seconds"), "s"),
    _Figure("simulated at", ("wall", "requests_per_s"), "requests/s"),
    _Figure("peak memory", ("wall", "peak_rss_bytes"), "MB"),
)
_KV_TRANSFER_FIGURES = (
    _Figure("remote prefills", ("kv_transfer", "remote"), "prompts"),
    _Figure("local prefills", ("kv_transfer", "local"), "prompts"),
    _Figure("KV transferred", ("kv_transfer", "bytes"), "GB"),
    *(
        _Figure(f"time to second token, {part}", ("kv_transfer", "second_token_s", part), "s", -1)
        for part in ("mean", "p50", "p90", "p99")
    ),
)
_ROLE_FIGURES = (
    _Figure("waiting, mean", ("waiting_requests", "mean"), "requests"),
    _Figure("in the batch, mean", ("running_requests", "mean"), "requests"),
    _Figure("KV in use, mean", ("kv_use", "mean"), "%"),
    _Figure("KV hit ratio", ("kv_hit_ratio",), "%"),
    _Figure("preemptions", ("preemptions",), "", -1),
)
_SCALING_FIGURES = (
    *(
        _Figure(f"workers {name}", ("scaling", "changes", change), "")
        for name, change in (("added", "add"), ("retired", "retire"), ("flipped", "flip"))
    ),
    _Figure("turns of scaling", ("scaling", "turns"), "", -1),
)
_SCALED_ROLE_FIGURES = (
    _Figure("workers that serve, mean", ("ready_mean",), ""),
    _Figure("workers that serve, most", ("ready_max",), ""),
)
_TENANT_FIGURES = (
    _Figure("requests", ("requests",), ""),
    _Figure("failed", ("failed",), "", -1),
    *(_Figure(f"TTFT, {part}", ("ttft_s", part), "s", -1) for part in ("mean", "p50", "p99")),
    _Figure("part of prompt tokens", ("prompt_token_share",), "%"),
    _Figure("part of output tokens", ("output_token_share",), "%"),
)
_WHOLE_PERCENT = 10
_SCALES = {"%": 100.0, "MB": 1e-6, "GB": 1e-9}


def summarize(reports: Sequence[Report]) -> list[SummaryRow]:
    """Make the rows of several reports; rows of one family, such as percentiles of TTFT, share a unit."""
    tiers = _tiers(reports)
    figures = (
        *_FIGURES,
        *_scaling_figures(reports),
        *_kv_transfer_figures(reports),
        *_tenant_figures(reports),
    )
    slowest_s: dict[str, float] = {}
    for figure in figures:
        if figure.unit == "s":
            values = [_value(report, figure.path) or 0.0 for report in reports]
            slowest_s[figure.path[0]] = max(slowest_s.get(figure.path[0], 0.0), *values)
    return [
        _row(
            figure,
            [_value(report, figure.path) for report in reports],
            in_ms=slowest_s.get(figure.path[0], 0.0) < 1.0,
        )
        for figure in figures
        if not figure.is_optional or figure.path[-1] in tiers
    ]


def _tiers(reports: Sequence[Report]) -> set[str]:
    """Give the tiers of all deployments; empty if all have the device only."""
    tiers = {
        tier
        for report in reports
        for tier, hits in report["kv_hit_ratio_by_tier"].items()
        if hits is not None
    }
    return tiers if tiers - {Tier.DEVICE} else set()


def _scaling_figures(reports: Sequence[Report]) -> list[_Figure]:
    """Give the rows of workers that were scaled, if any deployment's were."""
    if all(report["scaling"] is None for report in reports):
        return []
    roles = [role for role in Role if any(role in report["roles"] for report in reports)]
    return [
        *_SCALING_FIGURES,
        *(
            replace(
                figure, name=f"{role}: {figure.name}", path=("scaling", "roles", role.value, *figure.path)
            )
            for role in roles
            for figure in _SCALED_ROLE_FIGURES
        ),
    ]


def _kv_transfer_figures(reports: Sequence[Report]) -> list[_Figure]:
    """Give the rows of roles and KV transfers, if any deployment has several roles."""
    if all(report["kv_transfer"] is None for report in reports):
        return []
    roles = [role for role in Role if any(role in report["roles"] for report in reports)]
    return [
        *_KV_TRANSFER_FIGURES,
        *(
            replace(figure, name=f"{role}: {figure.name}", path=("roles", role.value, *figure.path))
            for role in roles
            for figure in _ROLE_FIGURES
        ),
    ]


def _tenant_figures(reports: Sequence[Report]) -> list[_Figure]:
    names = sorted({name for report in reports for name in report["tenants"]})
    return [
        replace(figure, name=f"{name}: {figure.name}", path=("tenants", name, *figure.path))
        for name in names
        for figure in _TENANT_FIGURES
    ]


def _value(report: Report, path: tuple[str, ...]) -> float | None:
    value: Any = report
    for part in path:
        if value is None or part not in value:  # this report lacks the tenant or role
            return None
        value = value[part]
    return None if value is None else float(value)


def _row(figure: _Figure, values: list[float | None], *, in_ms: bool) -> SummaryRow:
    known = [value for value in values if value is not None]
    scale, unit = _SCALES.get(figure.unit, 1.0), figure.unit
    if unit == "s" and in_ms:
        scale, unit = 1000.0, "ms"
    best = (
        max(known, key=lambda value: figure.better * value) if figure.better and len(set(known)) > 1 else None
    )
    first = values[0]
    cells = []
    for number, value in enumerate(values):
        difference = ""
        if number and figure.better and first and value is not None and value != first:
            percent = 100 * (value / first - 1)
            difference = f"{percent:+,.0f} %" if abs(percent) >= _WHOLE_PERCENT else f"{percent:+.1f} %"
        text = "-" if value is None else _readable(value * scale)
        cells.append(SummaryCell(text, difference, value is not None and value == best))
    return SummaryRow(figure.name, unit, tuple(cells))


def _readable(value: float) -> str:
    if value.is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def simulate_graph(
    graph: Graph,
    sessions: Iterable[SimSession],
    *,
    beside: Path = Path(),
    seed: int = 0,
    engine_profile: Path | None = None,
    exact: bool = False,
    start_s: float = START_S,
) -> Report:
    """Simulate a graph with a workload; may be called repeatedly in one process.

    Args:
        graph: roles in any mix.
        sessions: sorted by time.
        beside: second base of the model's relative path.
        seed: random seed.
        engine_profile: profile that all simulated engines use, while the router keeps the graph's estimates.
        exact: engines run every step.
        start_s: seconds that a worker takes to start, where the graph has a planner.

    Returns:
        The report of `penstock simulate --json`, without `inputs`.

    Raises:
        ConfigError: the graph or workload cannot be simulated; the text has the arithmetic.
    """
    workload = list(sessions)
    deployment = plan_deployment(graph, beside=beside, engine_profile=engine_profile, exact=exact)
    deployment.check(workload)
    started_s = perf_counter()
    recording = simulate(deployment, workload, seed=seed, start_s=start_s)
    return make_report(recording, deployment, graph.slo, wall_s=perf_counter() - started_s)
