"""What waits at each prefill worker, for those who look at metrics."""

import os

from penstock.core.types.load import WorkerLoad
from penstock.router.metrics import RouterMetrics


class PrefillGauges:
    """A series for each prefill worker that is there, by its name. One event loop owns it."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._gauges = (metrics.prefill_waiting_requests, metrics.prefill_oldest_wait_s)

    def note(self, name: str, load: WorkerLoad) -> None:
        """Show what a worker says."""
        self._set(name, load.waiting_requests, load.oldest_wait_s)

    def forget(self, name: str) -> None:
        """Show nothing of a worker that is none of them any more."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # where nothing that was written can be taken back
            self._set(name, 0, 0.0)
        else:
            for gauge in self._gauges:
                gauge.remove(name)

    def _set(self, name: str, waiting: int, oldest_s: float) -> None:
        for gauge, value in zip(self._gauges, (waiting, oldest_s), strict=True):
            gauge.labels(name).set(value)
