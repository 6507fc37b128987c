"""What the router and the dispatcher count, in a registry of the caller's."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Literal, Self, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.core.log import get_logger
from penstock.router.kv_tier_metrics import KvTierMetrics
from penstock.router.link_metrics import LinkMetrics
from penstock.router.refusal_metrics import RefusalMetrics

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
