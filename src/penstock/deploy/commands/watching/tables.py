"""A snapshot as tables: workers, models, tenants, requests, routing decisions, the planner's rounds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from penstock.deploy.commands.watching.seen import Seen
from penstock.deploy.commands.watching.words import line, seconds
from penstock.frontend.limits.tenants import TenantUse
from penstock.frontend.watch.snapshot import RegionRow, TierRow, WorkerRow
from penstock.router.dispatch.journeys import Journey
from penstock.router.explain.explanation import Explanation
from penstock.router.workers.member import Condition

_BAR = 12
_SERVES = frozenset({Condition.READY, Condition.PREFILL_ONLY})
_WORKERS = (
    "worker",
    "model",
    "role",
    "state",
    "#run",
    "#wait",
    "#step",
    "#tokens/s",
    "#prompts/s",
    "KV in use and cached",
)
_MODELS = (
    "model",
    "#workers",
    "#ready",
    "#run",
    "#wait",
    "#tokens/s",
    "#prompts/s",
    "#KV cached",
    "#TTFT, latest",
)
_TENANTS = ("tenant", "#in flight", "#at most", "#requests/s", "#tokens/min", "#tokens left")
_REQUESTS = (
    "request",
    "model",
    "tenant",
    "way",
    "#prompt",
    "#cached",
    "#output",
    "#queued",
    "#TTFT",
    "#took",
    "outcome",
)
_DECISIONS = ("#ago", "model", "worker", "why", "#cached blocks", "#cost", "terms", "next best", "left out")
_PLANNER = ("time", "round", "outcome", "what and why", "shortfall")


@dataclass(frozen=True, slots=True)
class Cell:
    """The text of a cell, and the value by which it is sorted, None last."""

    text: str
    value: float | str | None


@dataclass(frozen=True, slots=True)
class Row:
    """A line; `key` stays the same from one snapshot to the next."""

    key: str
    cells: tuple[Cell, ...]
    is_bad: bool = False

    def has(self, text: str) -> bool:
        """Tell whether a cell contains a text, in any case."""
        return any(text.casefold() in cell.text.casefold() for cell in self.cells)


@dataclass(frozen=True, slots=True)
class Table:
    """A named table; `#` before a column's name aligns its numbers at the right. `empty` says why there are no rows."""

    name: str
    columns: tuple[str, ...]
    rows: list[Row]
    empty: str


def sorted_rows(rows: Iterable[Row], column: int | None, *, descending: bool) -> list[Row]:
    """Sort by a column; None keeps the order. Cells without a value come last in both orders."""
    if column is None:
        return list(rows)
    known: list[Row] = []
    unknown: list[Row] = []
    for row in rows:
        (unknown if row.cells[column].value is None else known).append(row)
    is_text = any(isinstance(row.cells[column].value, str) for row in known)
    key: Callable[[Row], float | str] = lambda row: (  # noqa: E731 - values of a column are of one kind
        str(row.cells[column].value).casefold() if is_text else float(row.cells[column].value or 0)
    )
    return sorted(known, key=key, reverse=descending) + unknown


def tables(seen: Seen) -> list[Table]:
    """Make all tables of a snapshot."""
    return [
        Table("workers", _WORKERS, [_worker(each) for each in seen.snapshot.workers], "no worker yet"),
        Table("models", _MODELS, [_model(name, seen) for name in _names(seen)], "no model yet"),
        Table(
            "tenants",
            _TENANTS,
            [_tenant(each) for each in seen.snapshot.tenants],
            "no tenants: no API keys are set",
        ),
        Table("requests", _REQUESTS, [_request(each) for each in seen.requests], "no request yet"),
        Table(
            "decisions", _DECISIONS, [_decision(each) for each in reversed(seen.decisions)], "no request yet"
        ),
        Table("planner", _PLANNER, _rounds(seen), _no_rounds(seen)),
    ]


def _worker(worker: WorkerRow) -> Row:
    speed = worker.speed
    return Row(
        worker.name,
        (
            _text(worker.name),
            _text(worker.model),
            _text(worker.role),
            _text(worker.condition),
            _count(worker.running),
            _count(worker.waiting),
            _seconds(None if speed is None else speed.step_s),
            _count(None if speed is None else speed.generated_tokens_per_s),
            _count(None if speed is None else speed.prefilled_tokens_per_s),
            _kv(worker),
        ),
        is_bad=worker.condition not in _SERVES,
    )


def _kv(worker: WorkerRow) -> Cell:
    """Show the tiers; for a link, its region."""
    if worker.region is not None:
        return Cell(far(worker.region), None)
    drawn = "  ".join(bar(tier) for tier in worker.tiers)
    return Cell(drawn, worker.tiers[0].cached_blocks if worker.tiers else None)


def far(region: RegionRow) -> str:
    """Give a region's round trip, its healthy frontends and the age of its prefix summary."""
    away = "never reached" if region.round_trip_s is None else f"{seconds(region.round_trip_s)} away"
    summary = "" if region.advertised_age_s is None else f", prefixes {seconds(region.advertised_age_s)} ago"
    return line(f"{region.name} {away}, {region.healthy} of {region.frontends} frontends{summary}")


def bar(tier: TierRow) -> str:
    """Draw a tier's blocks: in use, cached, free."""
    total = tier.total_blocks or 1
    cached = tier.cached_blocks if tier.tier != "device" else max(tier.cached_blocks, tier.active_blocks)
    full, part = (min(_BAR, -(-_BAR * blocks // total)) for blocks in (tier.active_blocks, cached))
    drawn = "█" * full + "▒" * max(part - full, 0) + "·" * (_BAR - max(part, full))
    return f"{tier.tier} {drawn} {cached / total:.0%}" + (" off" if tier.is_off else "")


def _names(seen: Seen) -> list[str]:
    return sorted({*seen.snapshot.models, *(worker.model for worker in seen.snapshot.workers)})


def _model(name: str, seen: Seen) -> Row:
    """Sum up a model's workers; an adapter is served by those of its model, and has only its requests."""
    workers = [each for each in seen.snapshot.workers if each.model == name]
    speeds = [each.speed for each in workers if each.speed is not None]
    cached = sum(tier.cached_blocks for each in workers for tier in each.tiers if tier.tier == "device")
    total = sum(tier.total_blocks for each in workers for tier in each.tiers if tier.tier == "device")
    first = [wait for each in seen.requests if each.model == name and (wait := ttft_s(each)) is not None]
    ready = sum(each.condition in _SERVES for each in workers)
    is_adapter = not workers
    return Row(
        name,
        (
            _text(name),
            _count(None if is_adapter else len(workers)),
            _count(None if is_adapter else ready),
            _count(None if is_adapter else sum(each.running for each in workers)),
            _count(None if is_adapter else sum(each.waiting for each in workers)),
            _count(sum(each.generated_tokens_per_s for each in speeds) if speeds else None),
            _count(sum(each.prefilled_tokens_per_s for each in speeds) if speeds else None),
            Cell(f"{cached / total:.0%}", cached / total) if total else _count(None),
            _seconds(median(first) if first else None),
        ),
        is_bad=name not in seen.snapshot.models,
    )


def _tenant(tenant: TenantUse) -> Row:
    return Row(
        tenant.name,
        (
            _text(tenant.name),
            _count(tenant.inflight),
            _count(tenant.concurrency),
            _count(tenant.requests_per_s),
            _count(tenant.tokens_per_min),
            _count(tenant.tokens_left),
        ),
        is_bad=tenant.tokens_left is not None and tenant.tokens_left < 0,
    )


def ttft_s(journey: Journey) -> float | None:
    """Give the seconds from a request's opening to its first token at the worker that answers; None before that."""
    return next((leg.first_token_s for leg in reversed(journey.legs) if leg.first_token_s is not None), None)


def _request(journey: Journey) -> Row:
    return Row(
        journey.request_id,
        (
            _text(journey.request_id[-18:]),
            _text(journey.model),
            _text(journey.tenant or "-"),
            _text(" > ".join(leg.worker for leg in journey.legs) or "waits"),
            _count(journey.prompt_tokens),
            _count(journey.cached_tokens),
            _count(journey.output_tokens),
            _seconds(journey.queued_s),
            _seconds(ttft_s(journey)),
            _seconds(journey.seconds),
            _text(journey.outcome or "under way"),
        ),
    )


def cost(value: float | None, unit: str) -> str:
    """Format a cost."""
    return "never" if value is None else f"{value:.1f}" + ("" if unit == "none" else f" {unit}")


def terms(values: dict[str, float]) -> str:
    """Format the terms of a cost that are not zero."""
    return " + ".join(f"{name} {value:.1f}" for name, value in values.items() if abs(value) >= 0.05) or "-"


def _decision(each: Explanation) -> Row:
    prefill = None if each.prefill is None else each.prefill.worker
    chosen = each.chosen
    left_out = ", ".join(f"{left.worker} {left.why}" for left in each.left_out)
    return Row(
        f"{each.request_id} {each.worker}",
        (
            _seconds(each.age_s),
            _text(each.adapter or each.model),
            _text(each.worker if prefill is None else f"{prefill}, then {each.worker}"),
            _text(each.reason.replace("_", " ")),
            Cell(f"{chosen.overlap_blocks} of {each.request_blocks}", chosen.overlap_blocks),
            Cell(cost(chosen.cost, each.unit), chosen.cost),
            _text(terms(chosen.terms)),
            _text(each.next_worker or "nobody"),
            _text(left_out or "-"),
        ),
    )


def _rounds(seen: Seen) -> list[Row]:
    overview = seen.snapshot.overview
    rounds = () if overview is None or overview.planner is None else overview.planner
    return [
        Row(
            str(each.number),
            (
                Cell(clock(each.time_s), each.time_s),
                Cell(str(each.number), each.number),
                _text(each.outcome.replace("_", " ")),
                _text(each.text),
                _text(each.shortfall or "-"),
            ),
            is_bad=bool(each.shortfall),
        )
        for each in rounds
    ]


def _no_rounds(seen: Seen) -> str:
    overview = seen.snapshot.overview
    if overview is None or overview.planner is None:
        return "no planner: penstock serve --max-workers N starts one"
    return "it has not decided yet"


def clock(time_s: float) -> str:
    """Give the local time of day."""
    return datetime.fromtimestamp(time_s, UTC).astimezone().strftime("%H:%M:%S")


def _text(value: str) -> Cell:
    shown = line(value)
    return Cell(shown, None if shown == "-" else shown)


def _count(value: float | None) -> Cell:
    return Cell("-", None) if value is None else Cell(f"{value:,.0f}", value)


def _seconds(value: float | None) -> Cell:
    return Cell(seconds(value), value)
