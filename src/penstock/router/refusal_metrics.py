"""Gauges of connections that workers did not accept, from their load reports."""

import os
from collections.abc import Callable

from prometheus_client import Gauge

from penstock.core.types.load import RefusedFrontends


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
