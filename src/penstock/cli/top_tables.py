"""What `penstock top` shows of a snapshot, as text: the head, figures, alerts, tables and the details of a row."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median

import msgspec

from penstock.cli.text import columns, line, seconds
from penstock.core.errors import ConfigError
from penstock.frontend.limits.tenants import TenantUse
from penstock.frontend.watch.overview import Percentiles
from penstock.frontend.watch.snapshot import PageSnapshot, RegionRow, TierRow, WorkerRow
from penstock.router.dispatch.state import Journey, LegPart
from penstock.router.explanations import Candidate, RoutingExplanation
from penstock.router.fleet.member import Condition


@dataclass(frozen=True, slots=True)
class TopSnapshot:
    """A snapshot with the latest requests, and the latest decisions oldest first."""

    snapshot: PageSnapshot
    requests: list[Journey]
    decisions: list[RoutingExplanation]

    @classmethod
    def read(cls, body: bytes) -> "TopSnapshot":
        """Decode a snapshot; raises ConfigError for another body."""
        try:
            snapshot = msgspec.json.decode(body, type=PageSnapshot)
            return cls(
                snapshot,
                msgspec.convert(snapshot.requests, list[Journey]),
                msgspec.convert(snapshot.decisions, list[RoutingExplanation]),
            )
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"--url: the answer is not Penstock's, or another version's: {error}"
            ) from error


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
class TopCell:
    """The text of a cell, and the value by which it is sorted, None last."""

    text: str
    value: float | str | None


@dataclass(frozen=True, slots=True)
class TopRow:
    """A line; `key` stays the same from one snapshot to the next."""

    key: str
    cells: tuple[TopCell, ...]
    is_bad: bool = False

    def has(self, text: str) -> bool:
        """Tell whether a cell contains a text, in any case."""
        return any(text.casefold() in cell.text.casefold() for cell in self.cells)


@dataclass(frozen=True, slots=True)
class TopTable:
    """A named table; `#` before a column's name aligns its numbers at the right. `empty` says why there are no rows."""

    name: str
    columns: tuple[str, ...]
    rows: list[TopRow]
    empty: str


def sorted_rows(rows: Iterable[TopRow], column: int | None, *, descending: bool) -> list[TopRow]:
    """Sort by a column; None keeps the order. Cells without a value come last in both orders."""
    if column is None:
        return list(rows)
    known: list[TopRow] = []
    unknown: list[TopRow] = []
    for row in rows:
        (unknown if row.cells[column].value is None else known).append(row)
    is_text = any(isinstance(row.cells[column].value, str) for row in known)
    key: Callable[[TopRow], float | str] = lambda row: (  # noqa: E731 - values of a column are of one kind
        str(row.cells[column].value).casefold() if is_text else float(row.cells[column].value or 0)
    )
    return sorted(known, key=key, reverse=descending) + unknown


def tables(seen: TopSnapshot) -> list[TopTable]:
    """Make all tables of a snapshot."""
    return [
        TopTable("workers", _WORKERS, [_worker(each) for each in seen.snapshot.workers], "no worker yet"),
        TopTable("models", _MODELS, [_model(name, seen) for name in _names(seen)], "no model yet"),
        TopTable(
            "tenants",
            _TENANTS,
            [_tenant(each) for each in seen.snapshot.tenants],
            "no tenants: no API keys are set",
        ),
        TopTable("requests", _REQUESTS, [_request(each) for each in seen.requests], "no request yet"),
        TopTable(
            "decisions", _DECISIONS, [_decision(each) for each in reversed(seen.decisions)], "no request yet"
        ),
        TopTable("planner", _PLANNER, _rounds(seen), _no_rounds(seen)),
    ]


def _worker(worker: WorkerRow) -> TopRow:
    speed = worker.speed
    return TopRow(
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


def _kv(worker: WorkerRow) -> TopCell:
    """Show the tiers; for a link, its region."""
    if worker.region is not None:
        return TopCell(far(worker.region), None)
    drawn = "  ".join(bar(tier) for tier in worker.tiers)
    return TopCell(drawn, worker.tiers[0].cached_blocks if worker.tiers else None)


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


def _names(seen: TopSnapshot) -> list[str]:
    return sorted({*seen.snapshot.models, *(worker.model for worker in seen.snapshot.workers)})


def _model(name: str, seen: TopSnapshot) -> TopRow:
    """Sum up a model's workers; an adapter is served by those of its model, and has only its requests."""
    workers = [each for each in seen.snapshot.workers if each.model == name]
    speeds = [each.speed for each in workers if each.speed is not None]
    cached = sum(tier.cached_blocks for each in workers for tier in each.tiers if tier.tier == "device")
    total = sum(tier.total_blocks for each in workers for tier in each.tiers if tier.tier == "device")
    first = [wait for each in seen.requests if each.model == name and (wait := ttft_s(each)) is not None]
    ready = sum(each.condition in _SERVES for each in workers)
    is_adapter = not workers
    return TopRow(
        name,
        (
            _text(name),
            _count(None if is_adapter else len(workers)),
            _count(None if is_adapter else ready),
            _count(None if is_adapter else sum(each.running for each in workers)),
            _count(None if is_adapter else sum(each.waiting for each in workers)),
            _count(sum(each.generated_tokens_per_s for each in speeds) if speeds else None),
            _count(sum(each.prefilled_tokens_per_s for each in speeds) if speeds else None),
            TopCell(f"{cached / total:.0%}", cached / total) if total else _count(None),
            _seconds(median(first) if first else None),
        ),
        is_bad=name not in seen.snapshot.models,
    )


def _tenant(tenant: TenantUse) -> TopRow:
    return TopRow(
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


def _request(journey: Journey) -> TopRow:
    return TopRow(
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


def _decision(each: RoutingExplanation) -> TopRow:
    prefill = None if each.prefill is None else each.prefill.worker
    chosen = each.chosen
    left_out = ", ".join(f"{left.worker} {left.why}" for left in each.left_out)
    return TopRow(
        f"{each.request_id} {each.worker}",
        (
            _seconds(each.age_s),
            _text(each.adapter or each.model),
            _text(each.worker if prefill is None else f"{prefill}, then {each.worker}"),
            _text(each.reason.replace("_", " ")),
            TopCell(f"{chosen.overlap_blocks} of {each.request_blocks}", chosen.overlap_blocks),
            TopCell(cost(chosen.cost, each.unit), chosen.cost),
            _text(terms(chosen.terms)),
            _text(each.next_worker or "nobody"),
            _text(left_out or "-"),
        ),
    )


def _rounds(seen: TopSnapshot) -> list[TopRow]:
    overview = seen.snapshot.overview
    rounds = () if overview is None or overview.planner is None else overview.planner
    return [
        TopRow(
            str(each.number),
            (
                TopCell(clock(each.time_s), each.time_s),
                TopCell(str(each.number), each.number),
                _text(each.outcome.replace("_", " ")),
                _text(each.text),
                _text(each.shortfall or "-"),
            ),
            is_bad=bool(each.shortfall),
        )
        for each in rounds
    ]


def _no_rounds(seen: TopSnapshot) -> str:
    overview = seen.snapshot.overview
    if overview is None or overview.planner is None:
        return "no planner: penstock serve --max-workers N starts one"
    return "it has not decided yet"


def clock(time_s: float) -> str:
    """Give the local time of day."""
    return datetime.fromtimestamp(time_s, UTC).astimezone().strftime("%H:%M:%S")


def _text(value: str) -> TopCell:
    shown = line(value)
    return TopCell(shown, None if shown == "-" else shown)


def _count(value: float | None) -> TopCell:
    return TopCell("-", None) if value is None else TopCell(f"{value:,.0f}", value)


def _seconds(value: float | None) -> TopCell:
    return TopCell(seconds(value), value)


def head(seen: TopSnapshot) -> str:
    """Give the deployment, its models and its number of workers."""
    snapshot = seen.snapshot
    name = "" if snapshot.overview is None else f" {snapshot.overview.name}"
    models = ", ".join(snapshot.models) or "no model yet"
    return line(f"penstock{name}  {models}  {snapshot.num_workers} workers  version {snapshot.version}")


def alerts(seen: TopSnapshot, most: int) -> list[tuple[str, str]]:
    """Give (severity, text) of the worst alerts, and how many more there are; `fine` where nothing needs attention."""
    found = [(alert.severity.value, line(alert.text)) for alert in seen.snapshot.alerts]
    if not found:
        return [("fine", "nothing needs attention")]
    more = len(found) - most
    return found[:most] + ([("info", f"and {more} more")] if more > 0 else [])


def figures(seen: TopSnapshot) -> str:
    """Give rates, latencies and the queue on one line, and where prompt tokens came from on the next."""
    snapshot = seen.snapshot
    return "   ".join(_figures(snapshot)) + "\n" + _origins(snapshot)


def _figures(snapshot: PageSnapshot) -> Iterator[str]:
    seen = snapshot.overview
    if seen is not None:
        yield f"{seen.arrivals_per_s:.2f} requests/s"
        yield _latency("TTFT", seen.ttft)
        yield _latency("ITL", seen.itl)
    oldest = f", oldest {seconds(seen.oldest_queued_s)}" if seen is not None and snapshot.queued else ""
    yield f"queue {snapshot.queued}{oldest}"
    if seen is not None:
        yield f"{seen.output_tokens_per_s:,.0f} tokens/s"
        if seen.failed_per_s:
            yield f"{seen.failed_per_s:.2f} fail/s"


def _latency(name: str, seen: Percentiles | None) -> str:
    if seen is None:
        return f"{name} -"
    return f"{name} {seconds(seen.p50)} p90 {seconds(seen.p90)} p99 {seconds(seen.p99)}"


def _origins(snapshot: PageSnapshot) -> str:
    """Say where the prompt tokens of the listed workers came from, since they started."""
    counts: dict[str, int] = {}
    for worker in snapshot.workers:
        for tier in worker.tiers:
            counts[tier.tier] = counts.get(tier.tier, 0) + tier.hit_tokens
        counts["computed"] = counts.get("computed", 0) + worker.prefilled_tokens
    total = sum(counts.values())
    if not total:
        return "prompt tokens: none yet"
    parts = (
        f"{name} {count / total:.0%}"
        for name, count in sorted(counts.items(), key=lambda each: each[0] == "computed")
    )
    return f"prompt tokens: {', '.join(parts)} of {total:,}"


def details(seen: TopSnapshot, table: TopTable, key: str) -> list[str]:
    """Describe a row of a table; empty where it is there no longer."""
    match table.name:
        case "workers":
            return [
                text for each in seen.snapshot.workers if each.name == key for text in _worker_lines(each)
            ]
        case "requests":
            return [
                text
                for each in seen.requests
                if each.request_id == key
                for text in _request_lines(each, seen)
            ]
        case "decisions":
            of_key = (each for each in seen.decisions if f"{each.request_id} {each.worker}" == key)
            return [text for each in of_key for text in _decision_lines(each)]
        case "planner":
            return list(_round(seen, key))
    names = [name.removeprefix("#") for name in table.columns]
    return [
        f"{name}: {cell.text}"
        for row in table.rows
        if row.key == key
        for name, cell in zip(names, row.cells, strict=True)
    ]


def _worker_lines(worker: WorkerRow) -> Iterator[str]:
    where = f"process {worker.pid}" + (f" on {line(worker.host)}" if worker.host else "")
    yield line(f"{worker.name}: {worker.role} worker of {worker.model}, {where}")
    yield line(worker.condition.replace("_", " ") + (f": {worker.problem}" if worker.problem else ""))
    yield (
        f"{worker.running} run, {worker.waiting} wait, {worker.open_requests} of this frontend;"
        f" {worker.preemptions:,} preempted"
    )
    if worker.region is not None:
        yield f"another region: {far(worker.region)}"
    if worker.speed is not None:
        yield (
            f"{seconds(worker.speed.step_s)} a step, {worker.speed.generated_tokens_per_s:,.0f} tokens/s,"
            f" prompts {worker.speed.prefilled_tokens_per_s:,.0f} tokens/s"
        )
    yield (
        f"since it started: {worker.prefilled_tokens:,} prompt tokens computed, {worker.hit_tokens:,} cached,"
        f" {worker.generated_tokens:,} generated"
    )
    for tier in worker.tiers:
        yield (
            f"{bar(tier)}: {tier.active_blocks:,} blocks in use, {tier.cached_blocks:,} cached of {tier.total_blocks:,};"
            f" {tier.hit_tokens:,} prompt tokens came from it"
        )
    for link in worker.links:
        speed = f", {link.num_bytes / link.seconds / 1e6:,.1f} MB/s" if link.seconds else ""
        yield line(f"KV from {link.source}: {link.num_bytes / 1e6:,.1f} MB by {link.transport}{speed}")


def _request_lines(journey: Journey, seen: TopSnapshot) -> Iterator[str]:
    yield line(
        f"{journey.request_id}: {journey.model}" + (f", tenant {journey.tenant}" if journey.tenant else "")
    )
    cached = "" if journey.cached_tokens is None else f", {journey.cached_tokens:,} of them cached"
    yield f"frontend: {journey.prompt_tokens:,} prompt tokens{cached}"
    decisions = [each for each in seen.decisions if each.request_id == journey.request_id]
    why = f", {decisions[-1].reason.replace('_', ' ')}" if decisions else ""
    yield f"router: queued {seconds(journey.queued_s)}{why}"
    yield from _legs(journey)
    moved = f", moved {journey.migrations} times as workers were lost" if journey.migrations else ""
    yield (
        f"{journey.output_tokens:,} tokens of output, first after {seconds(ttft_s(journey))}, {journey.outcome or 'under way'}"
        f" after {seconds(journey.seconds)}{moved}"
    )
    for each in decisions:
        yield ""
        yield from _decision_lines(each)


def _legs(journey: Journey) -> Iterator[str]:
    for before, leg in pairwise((None, *journey.legs)):
        assert leg is not None, "only the first of the pairs has none before"
        if before is not None and leg.part is LegPart.DECODE:
            until_s = (leg.first_token_s or journey.seconds) - leg.sent_s
            yield line(f"KV transfer: {before.worker} to {leg.worker}, {seconds(until_s)} to its first token")
        what = {LegPart.PREFILL: "prefill", LegPart.DECODE: "decode", LegPart.WHOLE: "prefill and decode"}[
            leg.part
        ]
        if before is not None and leg.part is LegPart.WHOLE:
            what = "goes on"
        yield line(f"{what}: {leg.worker}, {seconds((leg.ended_s or journey.seconds) - leg.sent_s)}")


def _decision_lines(each: RoutingExplanation) -> Iterator[str]:
    yield line(
        f"decision of {seconds(each.age_s)} ago for {each.request_id}, policy {each.policy}: {each.reason.replace('_', ' ')}"
    )
    prefill = each.prefill
    if prefill is not None:
        yield line(
            f"prompt {f'by {prefill.worker}' if prefill.remote else 'where the answer is'}: "
            f"{cost(prefill.prefill, each.unit)} on a prefill worker and {cost(prefill.decode, each.unit)} on a decode worker,"
            f" against {cost(prefill.local, each.unit)} on one"
        )
        yield from _candidates("prefill workers by cost", prefill.candidates, each.unit)
    yield from _candidates("workers by cost", each.candidates, each.unit)
    if each.left_out:
        yield line(f"left out: {', '.join(f'{left.worker} {left.why}' for left in each.left_out)}")


def _candidates(title: str, found: tuple[Candidate, ...], unit: str) -> Iterator[str]:
    if found:
        yield f"{title}:"
    for each in found:
        yield "  " + line(
            f"{each.worker}: {cost(each.cost, unit)} = {terms(each.terms)}; {each.overlap_blocks} blocks cached"
        )


def _round(seen: TopSnapshot, key: str) -> Iterator[str]:
    overview = seen.snapshot.overview
    for each in () if overview is None or overview.planner is None else overview.planner:
        if str(each.number) != key:
            continue
        yield line(f"round {each.number}, {each.outcome.replace('_', ' ')}: {each.text}")
        if each.shortfall:
            yield line(f"the SLO is out of reach: {each.shortfall}")
        for term in each.terms:
            yield line(
                f"{term.role}: now {term.now}, floor {term.floor}, reaction {term.reaction}, keep {term.keep}, choice {term.choice}"
                + (f"; not fewer: {term.why_not_fewer}" if term.why_not_fewer else "")
            )


_ALERTS_MAX = 32


def plain(seen: TopSnapshot) -> Iterator[str]:
    """Yield the lines: head, alerts, figures, and each table that has rows."""
    yield head(seen)
    yield from (
        text if severity in {"fine", "info"} else f"{severity}: {text}"
        for severity, text in alerts(seen, _ALERTS_MAX)
    )
    yield from figures(seen).split("\n")
    for table in tables(seen):
        if table.rows:
            yield ""
            yield table.name
            yield from _lines(table)
            if table.name == "workers" and (more := seen.snapshot.num_workers - len(table.rows)) > 0:
                yield f"and {more} more workers"


def _lines(table: TopTable) -> Iterator[str]:
    head = tuple(name.removeprefix("#") for name in table.columns)
    right = {number for number, name in enumerate(table.columns) if name.startswith("#")}
    yield from columns([head, *(tuple(cell.text for cell in row.cells) for row in table.rows)], right)
