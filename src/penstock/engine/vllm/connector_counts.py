"""What vLLM's KV connectors report with its statistics: totals, and a line of the log every while."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock.core.log import get_logger

_LOG_INTERVAL_S = 30.0
_COUNTING = "CountingConnector"
_COUNTED = frozenset({"asked_requests", "asked_tokens", "full_blocks", "loaded_tokens", "saved_layers"})
_log = get_logger()


class ConnectorCounts:
    """Totals of the counting connector since the start; empty where vLLM runs without it."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()
        self._logged_s = 0.0

    def count(self, reported: Mapping[str, Any] | None, now_s: float) -> None:
        """Add a step's report.

        Args:
            reported: `SchedulerStats.kv_connector_stats`: the connector's own counts, or those by a MultiConnector's children.
            now_s: on the event loop's clock.
        """
        if not reported:
            return
        own = reported.get(_COUNTING, reported)
        self.totals.update({name: count for name, count in own.items() if name in _COUNTED})
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            self.log()

    def log(self) -> None:
        """Write the totals to the log, unless nothing has been counted since the last time."""
        if self.totals != self._logged:
            self._logged = Counter(self.totals)
            _log.info("vllm_kv_connector", **self.totals)
