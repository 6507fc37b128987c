"""Totals of a decode worker's KV reads, from which routers estimate the bandwidth of each link."""

from penstock.core.ids import WorkerId
from penstock.core.types.load import KvRead

_WORKERS_MAX = 256
"""Prefill workers with totals; beyond it the totals of the least recently read one are dropped."""
_REPORTED_MAX = 4
"""Most recently read workers in each load report; since totals are reported, nothing that a report omits is lost."""


class KvReads:
    """Totals by prefill worker, least recently read first. One event loop owns it."""

    def __init__(self) -> None:
        self.latest: tuple[KvRead, ...] = ()
        """Totals of the few prefill workers read from most recently."""
        self._by_worker: dict[WorkerId, KvRead] = {}
        self._ended_s: dict[WorkerId, float] = {}

    def add(
        self, prefill_worker: WorkerId, transport: str, num_bytes: int, begun_s: float, ended_s: float
    ) -> None:
        """Count a successful read; the time that several of one worker overlap counts once."""
        before = self._by_worker.pop(prefill_worker, None)
        begun_s = max(begun_s, self._ended_s.pop(prefill_worker, begun_s))
        self._ended_s[prefill_worker] = max(begun_s, ended_s)
        seconds = max(ended_s - begun_s, 0.0)
        if before is not None:
            num_bytes, seconds = before.num_bytes + num_bytes, before.seconds + seconds
        elif len(self._by_worker) >= _WORKERS_MAX:
            oldest = next(iter(self._by_worker))
            del self._by_worker[oldest], self._ended_s[oldest]
        self._by_worker[prefill_worker] = KvRead(
            prefill_worker=prefill_worker, transport=transport, num_bytes=num_bytes, seconds=seconds
        )
        others = [read for read in self.latest if read.prefill_worker != prefill_worker]
        self.latest = (*others[1 - _REPORTED_MAX :], self._by_worker[prefill_worker])
