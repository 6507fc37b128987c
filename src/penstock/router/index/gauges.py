"""What the prefix index counts, written into the metrics."""

import asyncio
import math
from collections.abc import Callable

from penstock.core.log import get_logger
from penstock.router.index.radix import RadixStats
from penstock.router.metrics import RouterMetrics

_log = get_logger()


_INDEX_INTERVAL_S = 1.0  # its figures move with every step of every worker, and are read every few seconds

_WARN_INTERVAL_S = 60.0  # between warnings that the index is full


class IndexGauges:
    """Writes what the prefix index counts into the metrics, at most once a second. One event loop owns it."""

    def __init__(
        self, metrics: RouterMetrics, read: Callable[[], RadixStats], why_full: Callable[[], str]
    ) -> None:
        """Read the index with `read`; `why_full` says what to do where it has to forget blocks."""
        self.events = 0
        """KV events applied so far; the indexer counts them."""
        self._metrics = metrics
        self._read = read
        self._why_full = why_full
        self._warned_s = -math.inf
        self._events_seen = self._evicted_seen = self._contradictions_seen = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self) -> None:
        """Write the metrics within a second."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_INDEX_INTERVAL_S, self._write)

    def _write(self) -> None:
        self._timer = None
        stats = self._read()
        self._metrics.indexed_blocks.set(stats.pairs)
        evicted = stats.evicted_pairs - self._evicted_seen
        self._metrics.evicted_blocks.inc(evicted)
        now_s = asyncio.get_running_loop().time()
        if evicted and now_s - self._warned_s >= _WARN_INTERVAL_S:
            self._warned_s = now_s
            _log.warning("index_full", blocks=stats.pairs, evicted=stats.evicted_pairs, fix=self._why_full())
        self._metrics.kv_events.inc(self.events - self._events_seen)
        self._metrics.event_faults.labels("contradiction").inc(
            stats.contradictions - self._contradictions_seen
        )
        self._evicted_seen, self._events_seen = stats.evicted_pairs, self.events
        self._contradictions_seen = stats.contradictions
