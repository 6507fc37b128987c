"""Gauges of the links to other regions, from their load reports."""

import os
from collections.abc import Callable

from prometheus_client import Gauge

from penstock.core.types.load import LinkReport


class LinkMetrics:
    """One frontend process's gauges. Links count, so that every frontend shows the same."""

    def __init__(self, gauge: Callable[..., Gauge]) -> None:
        """Make the gauges; `gauge` makes one from its name, text and labels."""
        labels = ("worker", "region")
        self._frontends = gauge("link_frontends", "Frontends of another region that its link knows", *labels)
        self._healthy = gauge(
            "link_healthy_frontends",
            "Frontends of another region that answer its link; 0: it gets no requests",
            *labels,
        )
        self._moved = gauge(
            "link_moved_requests",
            "Requests that went on at another frontend of the region, since the link's start, as one failed",
            *labels,
        )
        self._refused = gauge(
            "link_refused_requests",
            "Requests that the other region had no room for (429, 503), since the link's start",
            *labels,
        )
        self._skew = gauge(
            "link_clock_skew_seconds", "Seconds by which the other region's clock is ahead", *labels
        )
        self.told_chunks = gauge(
            "told_chunks", "Chunks of prefixes of which other regions tell that they hold them"
        )
        self._shown: dict[str, LinkReport] = {}

    def show(self, worker: str, link: LinkReport | None) -> None:
        """Show what a link reports; nothing of other workers."""
        if link is None or self._shown.get(worker) == link:
            return
        self._shown[worker] = link
        for gauge, value in (
            (self._frontends, link.frontends),
            (self._healthy, link.healthy),
            (self._moved, link.moved),
            (self._refused, link.refused),
            (self._skew, link.clock_skew_s),
        ):
            gauge.labels(worker, link.region).set(value)

    def forget(self, worker: str) -> None:
        """Remove a link's series; no error if there are none."""
        link = self._shown.pop(worker, None)
        if link is None:
            return
        for gauge in (self._frontends, self._healthy, self._moved, self._refused, self._skew):
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # files of several processes: none can be removed
                gauge.labels(worker, link.region).set(0)
            else:
                gauge.remove(worker, link.region)
