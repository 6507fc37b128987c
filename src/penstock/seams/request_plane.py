"""The request plane between frontends and workers: each side as the other sees it, and the connections between them."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.core.errors import PenstockError, WorkerLost
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import EventMessage, Holder
from penstock.core.types.instances import Instance, WorkerChange
from penstock.core.types.kv import KvAction, KvReport
from penstock.core.types.load import PeerCount, TenantCount, WorkerLoad
from penstock.core.types.requests import Delta, ExpandedPrompt, MediaPrompt, Prefetch, Request
from penstock.core.wire import PackedTokens
from penstock.seams.dispatch import DirectClient, DirectStream
from penstock.seams.event_carrier import BroadcastSink

Answer = Callable[[PenstockError | KvReport | None], None]
"""Called once when an operation ends: with a report or None on success, else with the error."""

MediaAnswer = Callable[[PenstockError | ExpandedPrompt], None]
"""Called once, with the expanded prompt or the error."""


class FrontendSink(Protocol):
    """One connected frontend, as a worker sees it. Not thread-safe."""

    def push(self, deltas: Sequence[Delta]) -> None:
        """Send all deltas of one step in one frame. Never blocks: deltas for a slow reader are buffered, merged and bounded."""
        ...

    def push_load(self, load: WorkerLoad) -> None:
        """Send the newest load report; drop an older one that is still unsent."""
        ...


class WorkerService(Protocol):
    """A worker, as a request plane sees it. Sync: called from the plane's reader task."""

    def check_rank(self, rank: int) -> None:
        """Check that the worker's engine has this data-parallel rank, before a connection for it is accepted.

        Raises:
            ProtocolError: it has not.
        """
        ...

    def connected(self, sink: FrontendSink, rank: int = 0, key: bytes = b"") -> None:
        """Push load reports of a data-parallel rank to this frontend from now on; the first call for each sink, made once.

        A frontend has a connection, and so a sink, for each rank. Requests of a sink are computed by its rank.

        Args:
            sink: the frontend's.
            rank: that the connection is for.
            key: not empty where the frontend hears load reports by a broadcast, which names it so.
        """
        ...

    def broadcast_to(self, sink: BroadcastSink) -> None:
        """Tell all KV events from now on, and load reports for frontends with a key, to `sink` too."""
        ...

    def repeat_load(self, sink: FrontendSink) -> None:
        """Push to a frontend with a key the newest load report that was broadcast since the last one pushed, if any."""
        ...

    def refused(self, reason: str) -> None:
        """Count a frontend that was not accepted.

        Args:
            reason: its certificate does not fit (`tls`), or its secret, hash key or release is another (`refused`).
        """
        ...

    def submit(self, request: Request, sink: FrontendSink) -> None:
        """Start a request. A refusal is sent as a delta with `error`; this never raises."""
        ...

    def prefetch(self, prefetch: Prefetch, sink: FrontendSink) -> None:
        """Start to read KV for a request that will follow, if possible. It counts in `WorkerLoad.accepted_requests`."""
        ...

    def abort(self, request_id: RequestId, sink: FrontendSink) -> None:
        """Stop this frontend's request or prefetch; no error if there is none.

        A request of another frontend with the same id continues.
        """
        ...

    def disconnected(self, sink: FrontendSink) -> None:
        """Abort all requests and prefetches of this frontend: it is gone."""
        ...

    def events(self, rank: int = 0, holder: Holder = Holder.WORKER) -> "EventSource":
        """Give the KV events of a data-parallel rank, or those of another holder that the worker loads from.

        Raises:
            ProtocolError: it loads from no such holder.
        """
        ...

    def read_file(self, sha256: str) -> asyncio.Future[bytes | None]:
        """Read a file of the worker's model card by its content hash; None if there is no such file."""
        ...

    def change(self, change: WorkerChange | KvAction, answer: Answer) -> None:
        """Make a change, register as changed and call `answer`; or act on the KV cache and report.

        The change continues if the frontend that asked for it disconnects.
        """
        ...

    def expand_media(self, prompt: MediaPrompt, answer: MediaAnswer) -> None:
        """Have the engine expand a prompt, and call `answer`."""
        ...

    def count_tenants(self, counts: Mapping[str, TenantCount], sink: FrontendSink) -> dict[str, PeerCount]:
        """Add what tenants have used at this frontend, by name, and give what they have used at others that count here."""
        ...


class EventSource(Protocol):
    """The KV events of one data-parallel rank of a worker, or of another holder."""

    @property
    def holder(self) -> Holder: ...

    @property
    def sequence(self) -> int:
        """The number of the latest batch."""
        ...

    def events_after(self, sequence: int | None) -> Iterator[EventMessage | None]:
        """Replay KV events to a subscriber: the batches after `sequence`, or a snapshot if these are no longer kept or None is given.

        Messages are built lazily. A None between them says that enough was done for one turn of the event loop.
        """
        ...

    def subscribe(self, sink: "EventSink") -> None:
        """Push every later `EventBatch` to `sink` until `unsubscribe`."""
        ...

    def unsubscribe(self, sink: "EventSink") -> None: ...


class EventSink(Protocol):
    """A subscriber to a worker's KV events."""

    def push_event(self, message: EventMessage) -> None: ...


class WorkerSink(Protocol):
    """A frontend, as the connections to its workers see it: called as frames arrive. Sync, must not raise."""

    def push(self, worker_id: WorkerId, deltas: Sequence[Delta]) -> None:
        """Receive the deltas of one step; some may belong to requests that were aborted meanwhile."""
        ...

    def written(self, worker_id: WorkerId, tokens: int) -> None:
        """Count tokens that direct streams have written."""
        ...

    def push_event(self, worker_id: WorkerId, message: EventMessage) -> None: ...

    def push_load(self, worker_id: WorkerId, load: WorkerLoad) -> None: ...

    def lost(self, worker_id: WorkerId, error: WorkerLost) -> None:
        """The connection ended without `close`; nothing more arrives on it. Called once."""
        ...


class WrittenTokens(NamedTuple):
    """What a direct stream has got: packed tokens that were written, those that came and were not, and how many to grant."""

    written: PackedTokens
    waiting: PackedTokens
    ungranted: int


class Connection(Protocol):
    """A frontend's connection to one worker, shared by all its requests."""

    @property
    def worker_id(self) -> WorkerId: ...

    def submit(self, request: Request) -> None:
        """Send a request; deltas and a refusal of the worker arrive at the sink.

        Raises:
            WorkerLost: the connection is closed already.
            Backlogged: the write buffer to this worker is full; nothing of the request was sent.
            Overloaded: too many requests are under way on this connection.
            RequestError: the request is larger than the plane carries (413).
        """
        ...

    def prefetch(self, prefetch: Prefetch) -> None:
        """Ask the worker to read KV for a request that will probably follow. It sends no answer; `abort` ends it.

        Raises:
            WorkerLost: the connection is closed already.
            Backlogged: the write buffer to this worker is full; nothing was sent.
            Overloaded: too many requests are under way on this connection.
            RequestError: the message is larger than the plane carries (413).
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Ask the worker to stop a request; no error if the connection or the request is gone."""
        ...

    def grant(self, request_id: RequestId, tokens: int) -> None:
        """Allow the worker to send `tokens` more tokens of this request, since its reader has consumed as many."""
        ...

    def open_direct(self, request_id: RequestId, stream: DirectStream, client: DirectClient) -> bool:
        """Write a request's tokens by a rule from now on, and grant them, until any other delta of it comes or `close_direct`.

        Each turn's tokens are one chunk; they do not come to the sink. False where this plane cannot.
        """
        ...

    def close_direct(self, request_id: RequestId) -> WrittenTokens | None:
        """End it; None if it is not open. To be called before the next delta of the request is handled."""
        ...

    def subscribe(self, after_sequence: int | None, holder: Holder = Holder.WORKER) -> None:
        """Subscribe to the KV events of a holder after `after_sequence` (None: after a snapshot); a second call resyncs."""
        ...

    def unsubscribe(self, holder: Holder) -> None:
        """End a subscription; events that are under way still arrive. No error without one."""
        ...

    async def fetch(self, sha256: str) -> bytes:
        """Fetch a model card's file by its content hash, and verify it.

        Raises:
            RequestError: the worker has no such file (404).
            WorkerLost: the connection ended.
        """
        ...

    async def change(self, change: WorkerChange | KvAction) -> KvReport | None:
        """Have the worker make a change; return once it has registered as changed. The caller sets a timeout.

        An action on its KV cache returns a report.

        Raises:
            RequestError: the worker refuses; the text says why (409).
            WorkerLost: the connection ended; only discovery tells whether the worker has changed.
        """
        ...

    async def expand_media(self, prompt: MediaPrompt) -> ExpandedPrompt:
        """Have the worker's engine expand the media of a prompt. The caller sets a timeout.

        Raises:
            RequestError: the engine does not take these media (400), or they are too large to be sent (413).
            Overloaded: too many bytes or prompts wait already; try another worker.
            WorkerLost: the connection ended.
        """
        ...

    async def count_tenants(self, counts: Mapping[str, TenantCount]) -> Mapping[str, PeerCount]:
        """Have the worker add what this frontend's tenants have used, and give what they have used at others.

        The caller sets a timeout: a worker of an older version does not answer.

        Raises:
            WorkerLost: the connection ended.
        """
        ...

    async def close(self) -> None: ...


class PlaneServer(Protocol):
    """A worker's listening end."""

    @property
    def address(self) -> str:
        """The address for `Instance.address`."""
        ...

    async def close(self) -> None:
        """Flush buffers for a short time, then end every connection."""
        ...


class RequestPlaneClient(Protocol):
    """A frontend's half of a request plane."""

    async def connect(self, instance: Instance, sink: WorkerSink) -> Connection:
        """Connect to a worker and authenticate.

        Raises:
            WorkerLost: nothing answers at the address.
            ProtocolError: the worker has another wire version, hash version or hash key.
        """
        ...


class RequestPlane(RequestPlaneClient, Protocol):
    """Streaming calls to workers: many requests on one connection, one frame per step."""

    async def serve(self, service: WorkerService) -> PlaneServer: ...
