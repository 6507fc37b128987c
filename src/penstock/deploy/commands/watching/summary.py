"""The lines above the tables: models and workers, alerts, latencies, queue, origins of prompt tokens."""

from collections.abc import Iterator

from penstock.deploy.commands.watching.seen import Seen
from penstock.deploy.commands.watching.words import line, seconds
from penstock.frontend.watch.overview import Percentiles
from penstock.frontend.watch.snapshot import PageSnapshot


def head(seen: Seen) -> str:
    """Give the deployment, its models and its number of workers."""
    snapshot = seen.snapshot
    name = "" if snapshot.overview is None else f" {snapshot.overview.name}"
    models = ", ".join(snapshot.models) or "no model yet"
    return line(f"penstock{name}  {models}  {snapshot.num_workers} workers  version {snapshot.version}")


def alerts(seen: Seen, most: int) -> list[tuple[str, str]]:
    """Give (severity, text) of the worst alerts, and how many more there are; `fine` where nothing needs attention."""
    found = [(alert.severity.value, line(alert.text)) for alert in seen.snapshot.alerts]
    if not found:
        return [("fine", "nothing needs attention")]
    more = len(found) - most
    return found[:most] + ([("info", f"and {more} more")] if more > 0 else [])


def figures(seen: Seen) -> str:
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
