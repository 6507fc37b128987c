"""A histogram for something that happens at every token: observing each value alone takes 0.8 us, gathering it 0.1."""

import asyncio
from array import array
from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import Histogram, Metric

_FLUSH_S = 1.0
"""How long a value waits at most, for other processes that read this one's metrics."""
_VALUES_MAX = 4096


class GatheredHistogram(Histogram):
    """Counts values of `gather` whenever it is read, and every second. One event loop owns it."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._gathered = array("d")

    def gather(self, value: float) -> None:
        """Note a value; the labels are set."""
        gathered = self._gathered
        if not gathered:
            asyncio.get_running_loop().call_later(_FLUSH_S, self._count)
        gathered.append(value)
        if len(gathered) >= _VALUES_MAX:
            self._count()

    def flush(self) -> None:
        """Count what was gathered for all labels."""
        for child in self._metrics.values():
            assert isinstance(child, GatheredHistogram), "of the same class"
            child._count()

    def collect(self) -> Iterable[Metric]:
        self.flush()
        return super().collect()

    def _count(self) -> None:
        gathered, self._gathered = self._gathered, array("d")
        if not gathered:
            return
        counts = [0] * len(self._upper_bounds)
        for value in gathered:
            counts[bisect_left(self._upper_bounds, value)] += 1
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(sum(gathered))
