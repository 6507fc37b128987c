"""Latency targets."""

from penstock.core.wire import Wire


class Slo(Wire, frozen=True):
    """`percentile` percent of requests meet each target, in seconds."""

    ttft_s: float
    itl_s: float
    percentile: float = 99.0
