"""Latency targets."""

from penstock.core.wire import Wire


class Slo(Wire, frozen=True):
    """`percentile` percent of requests meet each target, in seconds."""

    ttft_s: float
    itl_s: float
    percentile: float = 99.0

    @property
    def samples_min(self) -> int:
        """Requests of which one is beyond the percentile: fewer tell nothing of it."""
        return max(1, round(100 / (100 - self.percentile)))
