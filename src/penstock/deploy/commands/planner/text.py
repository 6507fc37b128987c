"""Rounds of the planner in words."""

from collections.abc import Iterator
from datetime import UTC, datetime

from penstock.core.types.instances import Role
from penstock.planner.decide.decision import Decision
from penstock.planner.explain.entries import Round
from penstock.planner.explain.record import DecisionRecord, Expected, RoleSeen, Seen

_OUTCOMES = {
    "blind": "nothing was known",
    "held": "held still",
    "refused": "some changes were refused",
    "dry_run": "would have changed workers",
    "changed": "changed workers",
    "kept": "kept the workers",
}


def clock(time_s: float, *, with_date: bool = False) -> str:
    """Format a time of this machine's zone."""
    local = datetime.fromtimestamp(time_s, tz=UTC).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S")


def line(entry: Round) -> str:
    """Format a round in one line."""
    return f"{clock(entry.time_s)}  {entry.record.number:>5}  {entry.record.outcome:<7}  {entry.record.explain()}"


def folded(entry: Round) -> str:
    """Say how many rounds before this one are not in the log; empty if none."""
    if not entry.like_before:
        return ""
    rounds = "1 round" if entry.like_before == 1 else f"{entry.like_before} rounds"
    return f"{'':8}  {'':>5}  {rounds} more came to the same"


def paragraphs(entry: Round, role: Role | None = None) -> Iterator[str]:
    """Format all that is known of a round, or of one role in it."""
    record = entry.record
    yield f"round {record.number} at {clock(entry.time_s, with_date=True)}: {_OUTCOMES[record.outcome]}"
    yield from _labelled("did", _did(record))
    if record.held:
        yield from _labelled("held", [record.held])
    yield from _labelled("refused", list(record.refused))
    yield from _labelled("damping", list(record.damped))
    if record.overdue:
        yield from _labelled("overdue", record.late_starts)
    yield from _labelled("waits", list(record.waits))
    if record.decision is not None:
        yield from _labelled("decided", _decided(record, record.decision, role))
        yield from _labelled("for", [_asked(record.decision)])
    yield from _labelled("expected", [_expected(each) for each in record.expected])
    yield from _labelled("saw", [_seen(record.seen, record.decision)])
    yield from _labelled(
        "workers", [_workers(seen) for seen in record.seen.roles if role is None or seen.role is role]
    )


def _labelled(label: str, lines: list[str]) -> Iterator[str]:
    for number, text in enumerate(lines):
        yield f"  {'' if number else label:<9} {text}"


def _did(record: DecisionRecord) -> list[str]:
    changes = [f"{name} becomes {role}" for name, role in record.flips]
    changes += [
        f"starts {count} {role} {'worker' if count == 1 else 'workers'}"
        for role, count in record.adds.items()
    ]
    changes += [f"retires {name}" for name in record.retires]
    said = [", ".join(changes) or "nothing"]
    if record.is_dry and changes:
        said[0] += " (dry run: not done)"
    if record.late:
        said.append(f"retires or flips {', '.join(record.late)} once others are ready")
    return said


def _decided(record: DecisionRecord, decision: Decision, role: Role | None) -> list[str]:
    said = []
    for term in decision.terms:
        if role is not None and term.role is not role:
            continue
        aim = record.target.get(term.role, term.choice)
        damped = "" if aim == term.choice else f", {aim} after damping"
        said.append(
            f"{term.role}: {term.now} -> {term.choice}{damped}; the forecast needs {term.floor}, queue and latencies"
            f" {term.reaction}, scale-in stops at {term.keep}"
        )
        said.append(f"  not fewer: {term.why_not_fewer.removeprefix(f'{term.role}: ')}")
    said += [
        f"{other}: {record.now.get(other, 0)} -> {count}; decided was the other kind of deployment"
        for other, count in record.target.items()
        if other not in decision.target and (role is None or other is role)
    ]
    if decision.shortfall:
        said.append(f"the SLO is out of reach: {decision.shortfall}")
    return said


def _asked(decision: Decision) -> str:
    expected, slo = decision.expected, decision.slo
    late = [
        f"{name} {value * 1e3:.1f} ms now"
        for name, value in (
            ("TTFT", expected.ttft_s),
            ("TTFT at decode workers", expected.decode_ttft_s),
            ("ITL", expected.itl_s),
        )
        if value is not None
    ]
    return (
        f"{expected.rate_per_s:.2f} requests/s of {expected.input_tokens} input tokens, {expected.cached_share:.0%} cached,"
        f" and {expected.output_tokens} output tokens, {expected.queued} queued{''.join(f', {each}' for each in late)};"
        f" TTFT {slo.ttft_s * 1e3:g} ms and ITL {slo.itl_s * 1e3:g} ms of {slo.percentile:g} % of requests"
    )


def _expected(each: Expected) -> str:
    error = "" if each.mean_error is None else f", off by {each.mean_error:.3g} on average"
    cold = ", too few values yet" if each.is_cold else ""
    return f"{each.series} {each.mean:.4g}, {each.low:.4g} to {each.high:.4g} ({each.method}{error}{cold})"


def _seen(seen: Seen, decision: Decision | None) -> str:
    parts = [f"{seen.arrivals_per_s:.2f} requests/s in {seen.seconds:.0f} s"]
    percentile = "" if decision is None else f" p{decision.slo.percentile:g}"
    latencies = (("TTFT", seen.ttft_s), ("TTFT at decode workers", seen.decode_ttft_s), ("ITL", seen.itl_s))
    for name, value in latencies:
        if value is not None:
            parts.append(f"{name}{percentile} {value * 1e3:.1f} ms")
    if seen.failed_per_s:
        parts.append(f"{seen.failed_per_s:.2f} failed/s")
    oldest = f", the oldest for {seen.oldest_queued_s:.1f} s" if seen.queued else ""
    parts.append(f"{seen.queued} queued{oldest}")
    if seen.silent:
        parts.append(f"silent: {', '.join(seen.silent)}")
    return ", ".join(parts)


def _workers(seen: RoleSeen) -> str:
    cold = f" ({seen.cold} ready for a short time)" if seen.cold else ""
    steps = "" if seen.step_s is None else f", steps of {seen.step_s * 1e3:.1f} ms"
    factor = "" if seen.factor == 1 else f", {seen.factor:.2f} times as long as predicted"
    gpus = ""
    if seen.gpu_watts is not None and seen.gpu_utilization is not None:
        gpus = f", GPUs at {seen.gpu_watts:,.0f} W and {seen.gpu_utilization:.0%}"
    return (
        f"{seen.role}: {seen.workers} seen{cold}, {seen.running} running, {seen.waiting} waiting, KV"
        f" {seen.kv_usage:.0%}{steps}{factor}{gpus}"
    )
