"""A request plane to servers to which the gateway sends requests itself: always connected, carries load reports and KV events only."""

from collections.abc import Mapping, Sequence

from penstock.core.errors import RequestError
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import EventMessage, Holder, KvEvent
from penstock.core.types.instances import Instance, WorkerChange
from penstock.core.types.kv import KvAction, KvReport
from penstock.core.types.load import PeerCount, TenantCount, WorkerLoad
from penstock.core.types.requests import ExpandedPrompt, MediaPrompt, Prefetch, Request
from penstock.runtime.events.publisher import EventPublisher
from penstock.runtime.events.subscriber import EventFeed
from penstock.seams import Connection, DirectClient, DirectStream, WorkerSink


class ReportPlane:
    """A `seams.RequestPlaneClient` whose connections succeed at once."""

    def __init__(self) -> None:
        self._connections: dict[WorkerId, _ReportConnection] = {}

    async def connect(self, instance: Instance, sink: WorkerSink) -> Connection:
        connection = _ReportConnection(instance.worker_id, sink, self._connections)
        self._connections[instance.worker_id] = connection
        return connection

    def report(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        """Report a server's load to the router, if it is connected."""
        connection = self._connections.get(worker_id)
        if connection is not None:
            connection.sink.push_load(worker_id, load)

    def publish(self, worker_id: WorkerId, events: Sequence[KvEvent]) -> None:
        """Tell the router of a server's KV events, if it is connected."""
        connection = self._connections.get(worker_id)
        if connection is not None:
            connection.publisher.publish(events)


class _ReportConnection:
    """One server's connection; an `EventOutlet` too, with the server's own feed and content."""

    writable = True

    def __init__(
        self, worker_id: WorkerId, sink: WorkerSink, connections: "dict[WorkerId, _ReportConnection]"
    ) -> None:
        self.worker_id = worker_id
        self.sink = sink
        self.publisher = EventPublisher()
        self._feed = EventFeed(self.publisher, self)
        self._connections = connections

    def send_event(self, message: EventMessage) -> None:
        self.sink.push_event(self.worker_id, message)

    def submit(self, request: Request) -> None:
        """Leave it to the gateway."""

    def prefetch(self, prefetch: Prefetch) -> None:
        """Leave it to the gateway."""

    def abort(self, request_id: RequestId) -> None:
        """Leave it to the gateway."""

    def grant(self, request_id: RequestId, tokens: int) -> None:
        """Leave it to the gateway."""

    def open_direct(self, request_id: RequestId, stream: DirectStream, client: DirectClient) -> bool:  # noqa: ARG002
        return False  # no deltas come

    def close_direct(self, request_id: RequestId) -> None:
        """None is open."""

    def subscribe(self, after_sequence: int | None, holder: Holder = Holder.WORKER) -> None:  # noqa: ARG002 - servers tell of themselves
        self._feed.subscribe(after_sequence)

    def unsubscribe(self, holder: Holder) -> None:
        """Nobody has subscribed to another holder."""

    async def fetch(self, sha256: str) -> bytes:
        raise RequestError(f"file {sha256}: nothing is fetched from servers of a gateway", http_status=404)

    async def change(self, change: WorkerChange | KvAction) -> KvReport | None:
        raise RequestError(
            f"{type(change).__name__}: servers of a gateway cannot be changed", http_status=409
        )

    async def expand_media(self, prompt: MediaPrompt) -> ExpandedPrompt:
        raise RequestError(
            f"{len(prompt.items)} media: nothing is expanded by servers of a gateway", http_status=409
        )

    async def count_tenants(self, counts: Mapping[str, TenantCount]) -> Mapping[str, PeerCount]:
        raise RequestError(f"{len(counts)} tenants: servers of a gateway do not count them", http_status=409)

    async def close(self) -> None:
        self._feed.close()
        if self._connections.get(self.worker_id) is self:
            del self._connections[self.worker_id]
