"""Gauges of the sessions whose KV workers keep, from their load reports."""

import os
from collections.abc import Callable

from prometheus_client import Gauge

from penstock.core.types.load import SessionCounts

_GAUGES: tuple[tuple[str, str, Callable[[SessionCounts], float]], ...] = (
    ("sessions", "Open sessions whose KV a worker keeps, operators' pins included", lambda counts: counts.open),
    ("session_pinned_blocks", "Device blocks that open sessions keep", lambda counts: counts.pinned_blocks),
    ("session_pinned_blocks_max", "Device blocks that open sessions may keep", lambda counts: counts.pinned_blocks_max),
    ("speculative_kept", "Answers kept for a next turn without a session, since the worker's start", lambda counts: counts.speculative),
    ("speculative_used", "Answers kept for a next turn that it found, since the worker's start", lambda counts: counts.speculative_used),
    ("speculative_wasted", "Answers kept for a next turn that ended unused, since the worker's start", lambda counts: counts.speculative_wasted),
    ("sessions_opened", "Sessions opened since the worker's start", lambda counts: counts.opened),
)  # fmt: skip
_REASONS = ("closed", "expired", "displaced", "yielded", "cleared")


class SessionMetrics:
    """One frontend process's gauges. Workers count, so that every frontend shows the same; they begin at 0 with their worker."""

    def __init__(self, gauge: Callable[..., Gauge]) -> None:
        """Make the gauges.

        Args:
            gauge: makes one from its name, text and labels.
        """
        self._gauges = [(gauge(noun, text, "worker"), value) for noun, text, value in _GAUGES]
        self._ends = gauge(
            "session_ends", "Sessions ended since the worker's start, by reason", "worker", "reason"
        )
        self._shown: dict[str, SessionCounts] = {}

    def show(self, worker: str, counts: SessionCounts | None) -> None:
        """Show what a worker reports; None before its first session."""
        if counts is None or self._shown.get(worker) == counts:
            return
        self._shown[worker] = counts
        for gauge, value in self._gauges:
            gauge.labels(worker).set(value(counts))
        for reason in _REASONS:
            self._ends.labels(worker, reason).set(getattr(counts, reason))

    def forget(self, worker: str) -> None:
        """Remove a worker's series; no error if there are none."""
        if self._shown.pop(worker, None) is None:
            return
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # files of several processes: none can be removed
            nothing = SessionCounts()
            for gauge, value in self._gauges:
                gauge.labels(worker).set(value(nothing))
            for reason in _REASONS:
                self._ends.labels(worker, reason).set(0)
            return
        for gauge, _ in self._gauges:
            gauge.remove(worker)
        for reason in _REASONS:
            self._ends.remove(worker, reason)
