"""How frontends and workers talk: each side as the other sees it, and what carries it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from penstock.core.errors import PenstockError, WorkerLost
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import EventMessage
from penstock.core.types.instances import Instance, Role
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, Prefetch, Request

Answer = Callable[[PenstockError | None], None]
"""Hears once how something ended that was asked for: None where it was done."""


class FrontendSink(Protocol):
    """The far side of one connection, seen from a worker: one frontend. Not thread-safe."""

    def push(self, deltas: Sequence[Delta]) -> None:
        """Send all deltas of one step in one frame. Never blocks: what a reader is too slow for is held, merged and bounded."""
        ...

    def push_load(self, load: WorkerLoad) -> None:
        """Send the newest load; an older one not sent yet is dropped."""
        ...


class WorkerService(Protocol):
    """What a worker offers over a request plane. Sync: called from the plane's reader task."""

    def connected(self, sink: FrontendSink) -> None:
        """Push loads to this frontend from now on; called once, before anything else of it."""
        ...

    def submit(self, request: Request, sink: FrontendSink) -> None:
        """Start a request; refusals come back as a delta with `error`, never as an exception."""
        ...

    def prefetch(self, prefetch: Prefetch, sink: FrontendSink) -> None:
        """Fetch KV for a request that is about to come, if that can be; it counts as a request that came (`accepted_requests`)."""
        ...

    def abort(self, request_id: RequestId, sink: FrontendSink) -> None:
        """Stop whatever goes on for a request of this frontend, a prefetch too; no error if there is nothing.

        What goes on for another frontend under the same id goes on.
        """
        ...

    def disconnected(self, sink: FrontendSink) -> None:
        """Abort whatever this frontend had asked for: it is gone."""
        ...

    def events_after(self, sequence: int | None) -> Iterator[EventMessage | None]:
        """Replay what a subscriber lacks: the batches after `sequence`, or a snapshot (None, or too long ago).

        Messages are made as they are read. None among them says that enough was done for one turn of the event loop.
        """
        ...

    def subscribe(self, sink: "EventSink") -> None:
        """Have every later `EventBatch` pushed to `sink` until `unsubscribe`."""
        ...

    def unsubscribe(self, sink: "EventSink") -> None: ...

    def read_file(self, sha256: str) -> asyncio.Future[bytes | None]:
        """Read a model card's file by its content hash; None if it is not one of this worker's."""
        ...

    def change_role(self, role: Role, answer: Answer) -> None:
        """Become a worker of another role, once what is under way is done; `answer` is called once it is, or why not.

        It goes on though who asked has gone; then nobody hears the answer.
        """
        ...


class EventSink(Protocol):
    """Where a worker's event messages go."""

    def push_event(self, message: EventMessage) -> None: ...


class WorkerSink(Protocol):
    """A frontend's end of its connections: the plane calls it as frames arrive. Sync, must not raise."""

    def push(self, worker_id: WorkerId, deltas: Sequence[Delta]) -> None:
        """Take a step's deltas; those of a request that was aborted meanwhile may still be among them."""
        ...

    def push_event(self, worker_id: WorkerId, message: EventMessage) -> None: ...

    def push_load(self, worker_id: WorkerId, load: WorkerLoad) -> None: ...

    def lost(self, worker_id: WorkerId, error: WorkerLost) -> None:
        """The connection ended without `close`: nothing more comes from this worker on it. Called once."""
        ...


class Connection(Protocol):
    """A frontend's connection to one worker, shared by all its requests."""

    @property
    def worker_id(self) -> WorkerId: ...

    def submit(self, request: Request) -> None:
        """Send a request; deltas and the worker's refusal arrive at the sink.

        Raises:
            WorkerLost: the connection is closed already.
            Overloaded: too much is on its way to this worker; it has heard nothing of this request.
            RequestError: it is larger than the plane carries (413).
        """
        ...

    def prefetch(self, prefetch: Prefetch) -> None:
        """Tell the worker of a request that will probably be sent to it. Nothing comes of it but what `abort` ends.

        Raises:
            WorkerLost: the connection is closed already.
            Overloaded: too much is on its way to this worker; it has heard nothing of this.
            RequestError: it is larger than the plane carries (413).
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Ask the worker to stop; no error if the connection or the request is gone."""
        ...

    def grant(self, request_id: RequestId, tokens: int) -> None:
        """Allow the worker to send `tokens` more of this request: its reader has taken as many."""
        ...

    def subscribe(self, after_sequence: int | None) -> None:
        """Ask for the events after `after_sequence` (None: a snapshot) and all later ones; asking again resyncs."""
        ...

    async def fetch(self, sha256: str) -> bytes:
        """Fetch a model card's file by its content hash, and verify it.

        Raises:
            RequestError: the worker has no such file (404).
            WorkerLost: the connection ended.
        """
        ...

    async def change_role(self, role: Role) -> None:
        """Have the worker become one of another role; returns once it has registered as that. The caller bounds the time.

        Raises:
            RequestError: it does not; the text says why (409).
            WorkerLost: the connection ended; whether it did is for discovery to say.
        """
        ...

    async def close(self) -> None: ...


class PlaneServer(Protocol):
    """A worker's listening end."""

    @property
    def address(self) -> str:
        """What goes into `Instance.address`."""
        ...

    async def close(self) -> None:
        """Send what is buffered (briefly), then end every connection."""
        ...


class WayToWorkers(Protocol):
    """A frontend's half of a request plane."""

    async def connect(self, instance: Instance, sink: WorkerSink) -> Connection:
        """Connect and shake hands.

        Raises:
            WorkerLost: nobody answers at the address.
            ProtocolError: the peer speaks another wire or hash version, or has another hash key.
        """
        ...


class RequestPlane(WayToWorkers, Protocol):
    """Streaming calls to workers: many requests on one connection, one frame a step."""

    async def serve(self, service: WorkerService) -> PlaneServer: ...
