"""What the router and the dispatcher count, in a registry of the caller's."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.router.radix import RadixStats

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RouterMetrics:
    """One frontend process's counters. Making two in one registry is an error."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(noun: str, text: str, *labels: str) -> Counter:
            return Counter(f"penstock_router_{noun}", text, labels, registry=registry)

        def gauge(noun: str, text: str, *labels: str, together: Literal["livesum", "livemax"]) -> Gauge:
            # `together` says what several frontend processes' values come to
            return Gauge(
                f"penstock_router_{noun}", text, labels, registry=registry, multiprocess_mode=together
            )

        def histogram(noun: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"penstock_router_{noun}", text, registry=registry, buckets=buckets)

        self.decisions = counter("decisions", "Routing decisions by what they came to", "policy", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of routed requests")
        self.expected_hit_tokens = counter(
            "expected_hit_tokens", "Prompt tokens that the index knew to be cached where they were sent"
        )
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that workers did find in their caches")
        self.output_tokens = counter("output_tokens", "Tokens received from workers")
        self.requests = counter("requests", "Requests ended, by outcome", "outcome")
        self.open_requests = gauge("open_requests", "Requests under way", together="livesum")
        self.migrations = counter(
            "migrations", "Requests that had to leave their worker, by outcome", "outcome"
        )
        self.refusals = counter("refusals", "Requests refused by a worker")
        self.quarantined = counter(
            "quarantined_requests", "Requests refused because their content kills workers"
        )
        self.workers = gauge("workers", "Workers known, by condition", "condition", together="livemax")
        self.connections_lost = counter("connections_lost", "Connections to workers that ended")
        self.connect_failures = counter("connect_failures", "Tries to reach a worker that failed")
        self.indexed_blocks = gauge(
            "indexed_blocks", "(worker, block) pairs in the prefix index", together="livemax"
        )
        self.evicted_blocks = counter("evicted_blocks", "Pairs forgotten because the index was full")
        self.kv_events = counter("kv_events", "KV events applied to the prefix index")
        self.event_snapshots = counter("event_snapshots", "Snapshots of a worker's blocks taken over")
        self.first_token_s = histogram(
            "first_token_seconds", "From opening a request to its first token", _LATENCIES_S
        )
        self.request_s = histogram("request_seconds", "From opening a request to its end", _LATENCIES_S)
        self._evicted_seen = 0

    def note_index(self, stats: RadixStats) -> None:
        """Take over what the prefix index counts."""
        self.indexed_blocks.set(stats.pairs)
        self.evicted_blocks.inc(stats.evicted_pairs - self._evicted_seen)
        self._evicted_seen = stats.evicted_pairs
