"""A snapshot of a deployment as a screen of text."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from penstock.frontend.watch.overview import Overview, Percentiles
from penstock.frontend.watch.snapshot import RegionRow, Snapshot, TierRow, WorkerRow
from penstock.router.dispatch.journeys import Journey

_BAR = 12
_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_KILO, _TENTH, _MINUTES_S = 1000, 0.0995, 120.0


def screen(snapshot: Snapshot, requests: Sequence[Journey], rows: int) -> RenderableType:
    """Draw a snapshot on `rows` lines: alerts and figures whole, then workers and requests as far as there is room."""
    parts: list[RenderableType] = [_head(snapshot)]
    parts += [Text(alert.text, style=_STYLES[alert.severity]) for alert in snapshot.alerts]
    if not snapshot.alerts:
        parts.append(Text("nothing needs attention", style="green"))
    if snapshot.overview is not None:
        parts.append(_figures(snapshot.overview))
    left = rows - len(snapshot.alerts) - 8
    room = max(left - 2 - min(len(requests), left // 3), 3)
    parts += [Rule(style="dim"), _workers(snapshot.workers[:room])]
    if (more := snapshot.num_workers - min(len(snapshot.workers), room)) > 0:
        parts.append(Text(f"and {more} more workers", style="dim"))
    room = max(left - min(len(snapshot.workers), room) - 3, 0)
    if requests and room:
        parts += [Rule(style="dim"), _requests(requests[:room])]
    return Group(*parts)


def _head(snapshot: Snapshot) -> Text:
    name = "" if snapshot.overview is None else f" {snapshot.overview.name}"
    models = ", ".join(snapshot.models) or "no model yet"
    return Text.assemble(
        ("penstock", "bold"),
        f"{name}  {models}  {snapshot.num_workers} workers  {snapshot.queued} queued",
        ("  q ends", "dim"),
    )


def _figures(seen: Overview) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_row(
        f"{seen.arrivals_per_s:.2f} requests/s",
        _latency("TTFT", seen.ttft),
        _latency("ITL", seen.itl),
        f"{seen.output_tokens_per_s:,.0f} tokens/s",
        f"{seen.cached_share:.0%} of prompts cached",
        f"{seen.failed_per_s:.2f} fail/s" if seen.failed_per_s else "",
    )
    return table


def _latency(name: str, seen: Percentiles | None) -> str:
    if seen is None:
        return f"{name} -"
    return f"{name} {seconds(seen.p50)} p90 {seconds(seen.p90)} p99 {seconds(seen.p99)}"


def _workers(workers: Sequence[WorkerRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in (
        "worker",
        "role",
        "state",
        "run",
        "wait",
        "step",
        "tokens/s",
        "prompts/s",
        "KV in use and cached",
    ):
        is_number = head in {"run", "wait", "step", "tokens/s", "prompts/s"}
        table.add_column(head, justify="right" if is_number else "left", no_wrap=True)
    for worker in workers:
        speed = worker.speed
        step = "-" if speed is None or speed.step_s is None else seconds(speed.step_s)
        table.add_row(
            worker.name,
            worker.role,
            worker.condition,
            str(worker.running),
            str(worker.waiting),
            step,
            "-" if speed is None else f"{speed.generated_tokens_per_s:,.0f}",
            "-" if speed is None else f"{speed.prefilled_tokens_per_s:,.0f}",
            Text("  ").join(_bar(tier) for tier in worker.tiers)
            if worker.region is None
            else _far(worker.region),
        )
    return table


def _far(region: RegionRow) -> Text:
    """Say how far another region is, and what of it answers."""
    away = "never reached" if region.round_trip_s is None else f"{seconds(region.round_trip_s)} away"
    told = "" if region.told_age_s is None else f", told {seconds(region.told_age_s)} ago"
    return Text(f"{region.name} {away}, {region.healthy} of {region.frontends} frontends{told}")


def _bar(tier: TierRow) -> Text:
    """Draw a tier's blocks: in use, cached, free."""
    total = tier.total_blocks or 1
    cached = tier.cached_blocks if tier.tier != "device" else max(tier.cached_blocks, tier.active_blocks)
    full, part = (min(_BAR, -(-_BAR * blocks // total)) for blocks in (tier.active_blocks, cached))
    return Text.assemble(
        f"{tier.tier} ",
        ("█" * full, "dark_orange"),
        ("▒" * max(part - full, 0), "blue"),
        ("·" * (_BAR - max(part, full)), "dim"),
        f" {cached / total:.0%}" + (" off" if tier.is_off else ""),
    )


def _requests(requests: Sequence[Journey]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("request", "way", "prompt", "cached", "output", "queued", "took", "outcome"):
        is_text = head in {"request", "way", "outcome"}
        table.add_column(head, justify="left" if is_text else "right", no_wrap=True)
    for journey in requests:
        table.add_row(
            journey.request_id[-18:],
            " > ".join(leg.worker for leg in journey.legs) or "waits",
            str(journey.prompt_tokens),
            "-" if journey.cached_tokens is None else str(journey.cached_tokens),
            str(journey.output_tokens),
            seconds(journey.queued_s),
            seconds(journey.seconds),
            journey.outcome or "under way",
        )
    return table


def seconds(value: float) -> str:
    """Format a duration in few characters: 3.4 ms, 52 ms, 1.20 s."""
    if value < _TENTH / 10:
        return f"{value * _KILO:.1f} ms"
    if value < 1:
        return f"{value * _KILO:.0f} ms"
    return f"{value:.2f} s" if value < _MINUTES_S else f"{value / 60:.0f} min"
