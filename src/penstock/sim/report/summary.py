"""The table of a report: values with name and unit, and a comparison of several reports."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.types.events import Tier
from penstock.core.types.instances import Role

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of one report.

    difference: percent from the first report; empty without a comparison
    is_best:    best of all reports, if these differ
    """

    value: str
    difference: str = ""
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One value of all reports, in one unit."""

    name: str
    unit: str
    cells: tuple[Cell, ...]


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


def summarize(reports: Sequence[Report]) -> list[Row]:
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


def _row(figure: _Figure, values: list[float | None], *, in_ms: bool) -> Row:
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
        cells.append(Cell(text, difference, value is not None and value == best))
    return Row(figure.name, unit, tuple(cells))


def _readable(value: float) -> str:
    if value.is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
