"""What a worker has read of other workers' KV, and how long that took, for routers that price the next read."""

from penstock.core.ids import WorkerId
from penstock.core.types.load import KvRead

_PRODUCERS_MAX = 256
"""Beyond it, the one not read from for longest begins anew."""
_TOLD_MAX = 4
"""In each report, the latest: totals miss nothing that an earlier report left out."""


class KvReads:
    """Totals by producer, the one read from last at the end. One event loop owns it."""

    def __init__(self) -> None:
        """Have read nothing."""
        self.latest: tuple[KvRead, ...] = ()
        """Of the last few producers."""
        self._by_worker: dict[WorkerId, KvRead] = {}

    def add(self, prefill_worker: WorkerId, transport: str, num_bytes: int, seconds: float) -> None:
        """Count a read that has ended well."""
        before = self._by_worker.pop(prefill_worker, None)
        if before is not None:
            num_bytes, seconds = before.num_bytes + num_bytes, before.seconds + seconds
        elif len(self._by_worker) >= _PRODUCERS_MAX:
            del self._by_worker[next(iter(self._by_worker))]
        self._by_worker[prefill_worker] = KvRead(
            prefill_worker=prefill_worker, transport=transport, num_bytes=num_bytes, seconds=seconds
        )
        told = [read for read in self.latest if read.prefill_worker != prefill_worker]
        self.latest = (*told[1 - _TOLD_MAX :], self._by_worker[prefill_worker])
