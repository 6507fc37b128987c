"""A request plane to servers to which the gateway sends requests itself: always connected, carries load reports only."""

from dataclasses import dataclass

from penstock.core.errors import RequestError
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.changes import WorkerChange
from penstock.core.types.instances import Instance
from penstock.core.types.kv_actions import KvAction, KvReport
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Prefetch, Request
from penstock.seams import Connection, WorkerSink


class NullPlane:
    """A `seams.RequestPlaneClient` whose connections succeed at once."""

    def __init__(self) -> None:
        self._sinks: dict[WorkerId, WorkerSink] = {}

    async def connect(self, instance: Instance, sink: WorkerSink) -> Connection:
        self._sinks[instance.worker_id] = sink
        return _NullConnection(instance.worker_id, self._sinks)

    def report(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        """Report a server's load to the router, if it is connected."""
        sink = self._sinks.get(worker_id)
        if sink is not None:
            sink.push_load(worker_id, load)


@dataclass(frozen=True, slots=True)
class _NullConnection:
    worker_id: WorkerId
    sinks: dict[WorkerId, WorkerSink]

    def submit(self, request: Request) -> None:
        """Leave it to the gateway."""

    def prefetch(self, prefetch: Prefetch) -> None:
        """Leave it to the gateway."""

    def abort(self, request_id: RequestId) -> None:
        """Leave it to the gateway."""

    def grant(self, request_id: RequestId, tokens: int) -> None:
        """Leave it to the gateway."""

    def subscribe(self, after_sequence: int | None) -> None:
        """Hear nothing."""

    async def fetch(self, sha256: str) -> bytes:
        raise RequestError(f"file {sha256}: nothing is fetched from servers of a gateway", http_status=404)

    async def change(self, change: WorkerChange | KvAction) -> KvReport | None:
        raise RequestError(
            f"{type(change).__name__}: servers of a gateway cannot be changed", http_status=409
        )

    async def close(self) -> None:
        self.sinks.pop(self.worker_id, None)
