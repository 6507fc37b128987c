"""The requests that vLLM has, and the load of each data-parallel rank."""

from itertools import count

import msgspec

from penstock.core.errors import Overloaded, RequestError
from penstock.core.ids import RequestId
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Request
from penstock.engine.vllm.load import LoadCounts
from penstock.engine.vllm.requests import Running

_RETRY_AFTER_S = 1.0


class RequestTable:
    """Requests by their own ids and by vLLM's. The load counts of a rank change as its requests come and go.

    vLLM's id of a request is never used twice: a request id may come again while vLLM still aborts its first use.
    """

    def __init__(self, limit: int, ranks: int) -> None:
        """Make an empty table for at most `limit` requests on `ranks` data-parallel ranks."""
        self._limit = limit
        self.counts = [LoadCounts() for _ in range(ranks)]
        """Of each rank."""
        self._running: dict[str, Running] = {}
        self._ids: dict[RequestId, str] = {}
        self._serial = count()

    def __len__(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._running)

    def check(self, request: Request) -> None:
        """Check that a request may be added.

        Raises:
            RequestError: its id is under way.
            Overloaded: as many requests are here as may be.
        """
        if request.request_id in self._ids:
            raise RequestError(f"request_id: {request.request_id!r} is under way already; choose another")
        if len(self._running) >= self._limit:
            raise Overloaded(
                f"{len(self._running)} requests are here, at most {self._limit} may be; try another worker",
                retry_after_s=_RETRY_AFTER_S,
            )

    def next_id(self, request: Request) -> str:
        """Give an id by which vLLM may know a request."""
        return f"{request.request_id}-{next(self._serial)}"

    def add(self, vllm_id: str, request: Request, now_s: float, rank: int) -> None:
        """Add a request that is sent to vLLM, without the bytes of its media."""
        running = Running.of(msgspec.structs.replace(request, media=None), now_s, rank)
        self._ids[request.request_id] = vllm_id
        self._running[vllm_id] = running
        self.counts[rank].begin(vllm_id, running)

    def get(self, vllm_id: str) -> Running | None:
        """Return a request; None if it has ended."""
        return self._running.get(vllm_id)

    def vllm_id(self, request_id: RequestId) -> str | None:
        """Return vLLM's id of a request; None if it has ended."""
        return self._ids.get(request_id)

    def remove(self, vllm_id: str) -> Running:
        """Remove a request that has ended."""
        running = self._running.pop(vllm_id)
        del self._ids[running.request.request_id]
        self.counts[running.rank].end(vllm_id, running)
        return running

    def least_loaded(self) -> int:
        """Choose the rank of a request that no router sent: the one with the fewest requests."""
        return min(range(len(self.counts)), key=lambda rank: self.counts[rank].requests)

    def load(self, now_s: float) -> WorkerLoad:
        """Report the load of all ranks."""
        if len(self.counts) == 1:
            return self.counts[0].load(now_s)
        return WorkerLoad.of_ranks([counts.load(now_s) for counts in self.counts])
