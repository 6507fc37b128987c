"""Gauges of links to other regions, from their load reports."""

import os
from collections.abc import Callable

from prometheus_client import Gauge

from penstock.core.types.load import LinkProblem, LinkReport

_GAUGES: tuple[tuple[str, str, Callable[[LinkReport], float]], ...] = (
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
        self._gauges = [(gauge(name, text, "worker", "region"), value) for name, text, value in _GAUGES]
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
