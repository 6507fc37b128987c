"""What the router and the dispatcher count, in a registry of the caller's."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Literal, Self, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.core.log import get_logger
from penstock.core.types.events import Tier
from penstock.core.types.load import KvTierCounts, LinkProblem, LinkReport, RefusedFrontends

_TIER_GAUGES: tuple[tuple[str, str, Callable[[KvTierCounts], float]], ...] = (
    ("total_blocks", "Blocks that a worker's KV tier can keep", lambda tier: tier.total_blocks),
    ("cached_blocks", "Blocks that it keeps", lambda tier: tier.cached_blocks),
    ("total_bytes", "Bytes that it can keep", lambda tier: tier.total_blocks * tier.block_bytes),
    ("cached_bytes", "Bytes that it keeps", lambda tier: tier.cached_blocks * tier.block_bytes),
    ("off", "1 while it is not used, since it failed or hung", lambda tier: tier.is_off),
    ("hit_tokens", "Prompt tokens that requests found in it", lambda tier: tier.hit_tokens),
    ("loads", "Loads that have ended", lambda tier: tier.loads),
    ("loaded_blocks", "Blocks that were loaded and used", lambda tier: tier.loaded_blocks),
    ("load_seconds", "Sum of the seconds of its loads", lambda tier: tier.load_s),
    (
        "saved_seconds",
        "Predicted seconds of computing what was loaded, less what requests waited for it",
        lambda tier: tier.saved_s,
    ),
    ("offloaded_blocks", "Blocks copied to it", lambda tier: tier.offloaded_blocks),
    ("dropped_blocks", "Blocks that were not copied to it, since they were evicted first or it had no room", lambda tier: tier.dropped_blocks),
    ("late_loads", "Loads that were cancelled because they took too long", lambda tier: tier.late_loads),
    ("missing_blocks", "Blocks that did not arrive and were computed", lambda tier: tier.missing_blocks),
    ("prefetched_blocks", "Blocks whose load began while their request waited for the batch", lambda tier: tier.prefetched_blocks),
    ("wasted_blocks", "Of these, the blocks that were not needed, since the request left or others needed their room", lambda tier: tier.wasted_blocks),
    ("corrupt_blocks", "Blocks that did not match their checksum", lambda tier: tier.corrupt_blocks),
)  # fmt: skip


class KvTierMetrics:
    """One frontend process's gauges. Workers count, so that every frontend shows the same; they begin at 0 with their worker."""

    def __init__(self, gauge: Callable[[str, str], Gauge]) -> None:
        """Make the gauges.

        Args:
            gauge: makes one with the labels worker and tier, from its name and text.
        """
        self._gauges = [(gauge(f"kv_tier_{noun}", text), value) for noun, text, value in _TIER_GAUGES]
        self._series: dict[tuple[str, Tier], list[Gauge]] = {}
        self._shown: dict[str, tuple[KvTierCounts, ...]] = {}

    def show(self, worker: str, tiers: tuple[KvTierCounts, ...]) -> None:
        """Show what a worker reports."""
        if self._shown.get(worker, ()) == tiers:
            return
        self._shown[worker] = tiers
        for counts in tiers:
            key = worker, counts.tier
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = [gauge.labels(*key) for gauge, _ in self._gauges]
            for gauge, (_, value) in zip(series, self._gauges, strict=True):
                gauge.set(value(counts))

    def forget(self, worker: str) -> None:
        """Remove a worker's series; no error if there are none."""
        for counts in self._shown.pop(worker, ()):
            key = worker, counts.tier
            series = self._series.pop(key)
            for child, (gauge, _) in zip(series, self._gauges, strict=True):
                if (
                    "PROMETHEUS_MULTIPROC_DIR" in os.environ
                ):  # files of several processes: none can be removed
                    child.set(0)
                else:
                    gauge.remove(*key)


_LINK_GAUGES: tuple[tuple[str, str, Callable[[LinkReport], float]], ...] = (
    ("link_frontends", "Frontends of another region that its link knows", lambda link: link.frontends),
    (
        "link_healthy_frontends",
        "Frontends of another region that answer its link; 0: it gets no requests",
        lambda link: link.healthy,
    ),
    (
        "link_round_trip_seconds",
        "Measured time to another region and back, median of the latest answers; 0 before the first",
        lambda link: link.round_trip_s,
    ),
    (
        "link_moved_requests",
        "Requests that went on at another frontend of the region, since the link's start, as one failed",
        lambda link: link.moved,
    ),
    (
        "link_refused_requests",
        "Requests that the other region had no room for (429, 503), since the link's start",
        lambda link: link.refused,
    ),
    (
        "link_clock_skew_seconds",
        "Seconds by which the other region's clock is ahead",
        lambda link: link.clock_skew_s,
    ),
    (
        "link_advertised_timestamp_seconds",
        "Time of the last prefix summary of another region, since 1970; 0: never",
        lambda link: link.advertised_at_s,
    ),
)


class LinkMetrics:
    """The gauges of one frontend process. The links do the counting, so every frontend shows the same."""

    def __init__(self, gauge: Callable[..., Gauge]) -> None:
        """Make the gauges; `gauge` makes one from its name, text and labels."""
        self._gauges = [(gauge(name, text, "worker", "region"), value) for name, text, value in _LINK_GAUGES]
        self.advertised_chunks = gauge(
            "advertised_chunks", "Chunks of prefixes that other regions advertise in their summaries"
        )
        self._problems = gauge(
            "link_problem",
            "1 for what keeps requests from another region (unreachable, certificate, key, other_server), or its prefixes from"
            " counting (secret)",
            "worker",
            "region",
            "problem",
        )
        self._advertised_share = gauge(
            "link_advertised_share",
            "Share of another region's advertised prefixes that counts, as its answers confirm it; 1 without answers",
            "worker",
            "region",
        )
        self._shown: dict[str, LinkReport] = {}

    def show(self, worker: str, link: LinkReport | None) -> None:
        """Show a link's report; does nothing for other workers."""
        if link is None or self._shown.get(worker) == link:
            return
        before = self._shown.get(worker)
        self._shown[worker] = link
        if before is not None and before.problem and before.problem != link.problem:
            self._problems.labels(worker, link.region, before.problem).set(0)
        if link.problem:
            self._problems.labels(worker, link.region, link.problem).set(1)
        if before is None:
            self._advertised_share.labels(worker, link.region).set(1)
        for gauge, value_of in self._gauges:
            gauge.labels(worker, link.region).set(value_of(link))

    def show_advertised_share(self, worker: str, share: float) -> None:
        """Show the share of a region's advertised prefixes that counts; does nothing before the link's first report."""
        link = self._shown.get(worker)
        if link is not None:
            self._advertised_share.labels(worker, link.region).set(share)

    def expect(self, worker: str, region: str, frontends: int) -> None:
        """Show a link that has not registered yet, so that one that cannot start is seen, too."""
        self.show(worker, LinkReport(region, frontends, 0, problem=LinkProblem.UNREACHABLE))

    def forget(self, worker: str) -> None:
        """Remove a link's series; no error if there are none."""
        link = self._shown.pop(worker, None)
        if link is None:
            return
        series: list[tuple[Gauge, tuple[str, ...]]]
        series = [(gauge, (worker, link.region)) for gauge, _ in self._gauges]
        series.append((self._advertised_share, (worker, link.region)))
        if link.problem:
            series.append((self._problems, (worker, link.region, link.problem)))
        for gauge, labels in series:
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # files of several processes: none can be removed
                gauge.labels(*labels).set(0)
            else:
                gauge.remove(*labels)


class RefusalMetrics:
    """One frontend process's gauges. Workers count, so that every frontend that they accept shows the same."""

    def __init__(self, gauge: Callable[..., Gauge]) -> None:
        """Make the gauge.

        Args:
            gauge: makes one from its name, text and labels.
        """
        self._gauge = gauge(
            "worker_refused_frontends",
            "Connections that a worker has not accepted since its start: certificates do not fit (tls), or the secret, hash key"
            " or release is another (refused)",
            "worker",
            "reason",
        )
        self._shown: dict[str, tuple[RefusedFrontends, ...]] = {}

    def show(self, worker: str, refused: tuple[RefusedFrontends, ...]) -> None:
        """Show what a worker reports."""
        if self._shown.get(worker, ()) == refused:
            return
        self._shown[worker] = refused
        for each in refused:
            self._gauge.labels(worker, each.reason).set(each.count)

    def forget(self, worker: str) -> None:
        """Remove a worker's series; no error if there are none."""
        for each in self._shown.pop(worker, ()):
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # files of several processes: none can be removed
                self._gauge.labels(worker, each.reason).set(0)
            else:
                self._gauge.remove(worker, each.reason)


_log = get_logger()

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _Unread:
    """Stands for a metric without a registry."""

    def labels(self, *_: str) -> Self:
        return self

    def inc(self, amount: float = 1) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, amount: float) -> None: ...

    def remove(self, *_: str) -> None: ...

    def track_inprogress(self) -> AbstractContextManager[None]:
        return nullcontext()


class RouterMetrics:
    """One frontend process's metrics. Two in one registry are an error; without a registry, nothing is counted."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        def counter(noun: str, text: str, *labels: str) -> Counter:
            if registry is None:
                return cast("Counter", _Unread())
            return Counter(f"penstock_router_{noun}", text, labels, registry=registry)

        def gauge(noun: str, text: str, *labels: str, together: Literal["livesum", "livemax"]) -> Gauge:
            if registry is None:
                return cast("Gauge", _Unread())
            # `together` aggregates several frontend processes
            return Gauge(
                f"penstock_router_{noun}", text, labels, registry=registry, multiprocess_mode=together
            )

        def histogram(noun: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            if registry is None:
                return cast("Histogram", _Unread())
            return Histogram(f"penstock_router_{noun}", text, registry=registry, buckets=buckets)

        self.decisions = counter("decisions", "Routing decisions by reason", "policy", "reason")
        self.policy_failures = counter(
            "policy_failures",
            "Requests that ended because the policy failed",
            "policy",
        )
        self.prefills = counter(
            "prefills",
            "Prompts computed by prefill workers (remote), or by the worker that answers (local), where there was a choice",
            "place",
        )
        self.prefill_predicted_s = counter(
            "prefill_predicted_seconds",
            "Predicted seconds of these requests on one worker (local), and on two (prefill, decode, link_setup)",
            "part",
        )
        self.prefetches = counter(
            "prefetches",
            "Decode workers chosen together with a prefill worker: the request went there (used) or not (dropped)",
            "outcome",
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of routed requests")
        self.expected_hit_tokens = counter(
            "expected_hit_tokens", "Prompt tokens cached on the chosen worker, as the index knows"
        )
        self.predicted_hit_tokens = counter(
            "predicted_hit_tokens",
            "Prompt tokens predicted to be cached by workers without KV events, once these report how many were",
        )
        self.predicted_hits_found_tokens = counter(
            "predicted_hits_found_tokens", "Predicted tokens that were cached"
        )
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that workers found in their caches")
        self.output_tokens = counter("output_tokens", "Tokens received from workers")
        self.requests = counter("requests", "Requests ended, by outcome", "outcome")
        self.open_requests = gauge("open_requests", "Requests under way", together="livesum")
        self.queued_requests = gauge(
            "queued_requests", "Requests that wait in the router's queue", together="livesum"
        )
        self.queued_s = histogram(
            "queued_seconds", "How long requests waited in the router's queue", _LATENCIES_S
        )
        self.queue_refusals = counter(
            "queue_refusals",
            "Requests refused by a full queue (full), or for the share of their tenant (tenant)",
            "reason",
        )
        self.migrations = counter(
            "migrations", "Requests that had to leave their worker, by outcome", "outcome"
        )
        self.migrating_requests = gauge(
            "migrating_requests",
            "Requests of lost workers that wait to go on",
            together="livesum",
        )
        self.refusals = counter("refusals", "Requests refused by a worker")
        self.stale_routes = counter(
            "stale_routes",
            "Requests returned to be routed again, as other routers' requests arrived first",
        )
        self.parked = counter(
            "parked_requests", "Times a request left its worker until its slow reader had caught up"
        )
        self.quarantined = counter(
            "quarantined_requests", "Requests refused because their content kills workers"
        )
        self.workers = gauge("workers", "Workers known, by condition", "condition", together="livemax")
        self.prefill_waiting_requests = gauge(
            "prefill_waiting_requests",
            "Prompts queued at a prefill worker",
            "worker",
            together="livemax",
        )
        self.prefill_oldest_wait_s = gauge(
            "prefill_oldest_wait_seconds",
            "Age of a prefill worker's oldest prompt without a token",
            "worker",
            together="livemax",
        )
        self.kv_tiers = KvTierMetrics(
            lambda noun, text: gauge(noun, text, "worker", "tier", together="livemax")
        )
        shown = partial(gauge, together="livemax")
        self.links, self.refusals_by_workers = LinkMetrics(shown), RefusalMetrics(shown)
        self.connections_lost = counter("connections_lost", "Connections to workers that ended")
        self.connect_failures = counter(
            "connect_failures",
            "Tries to reach a worker that failed: nothing answered (unreachable), certificates do not fit (tls), or its secret,"
            " hash key or release is another (refused)",
            "reason",
        )
        self.indexed_blocks = gauge(
            "indexed_blocks", "(worker, block) pairs in the prefix index", together="livemax"
        )
        self.evicted_blocks = counter("evicted_blocks", "Pairs forgotten because the index was full")
        self.kv_events = counter("kv_events", "KV events applied to the prefix index")
        self.event_faults = counter(
            "event_faults",
            "KV events missing (gap), told again (repeated), of another block size than the model's (block_size), with"
            " hashes that are none (malformed), or naming a block's parent anew (contradiction)",
            "fault",
        )
        self.event_snapshots = counter("event_snapshots", "Snapshots of a worker's blocks taken over")
        self.first_token_s = histogram(
            "first_token_seconds", "From opening a request to its first token", _LATENCIES_S
        )
        self.request_s = histogram("request_seconds", "From opening a request to its end", _LATENCIES_S)
        # Finding a label's child takes four times as long as counting: 2.9 against 0.6 us on a shared AMD EPYC.
        self.decided: Callable[[str, str], Counter] = cache(self.decisions.labels)
        """Decisions of a policy for a reason."""
        self.ended: Callable[[str], Counter] = cache(self.requests.labels)
        """Requests with an outcome."""

    def show_prefill_worker(self, name: str, waiting_requests: int, oldest_wait_s: float) -> None:
        """Show what waits at a prefill worker, in a series of its own."""
        self.prefill_waiting_requests.labels(name).set(waiting_requests)
        self.prefill_oldest_wait_s.labels(name).set(oldest_wait_s)

    def forget_prefill_worker(self, name: str) -> None:
        """Remove a prefill worker's series."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # files of several processes: no series can be removed
            self.show_prefill_worker(name, 0, 0.0)
        else:
            self.prefill_waiting_requests.remove(name)
            self.prefill_oldest_wait_s.remove(name)
