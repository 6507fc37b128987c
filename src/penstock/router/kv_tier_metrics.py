"""Gauges of the workers' KV tiers, from their load reports."""

import os
from collections.abc import Callable

from prometheus_client import Gauge

from penstock.core.types.events import Tier
from penstock.core.types.load import KvTierCounts

_GAUGES: tuple[tuple[str, str, Callable[[KvTierCounts], float]], ...] = (
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
        self._gauges = [(gauge(f"kv_tier_{noun}", text), value) for noun, text, value in _GAUGES]
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
