"""Every seam of the system, and nothing else: protocols without code.

Write one of these to plug in your own engine, plane or policy; `penstock.testing` holds a conformance
suite for each. Async methods do I/O; sync methods never block. Every seam has a `memory` (or `mock`)
implementation, which is the reference the others are tested against.
"""

import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.core.descriptors import Descriptors, RangePairs, Region, RegionInfo, TransferCost, TransferOp
from penstock.core.errors import PenstockError, WorkerLost
from penstock.core.ids import BlockId, RequestId, WorkerId
from penstock.core.routing_context import PriceColumns as PriceColumns  # noqa: PLC0414 - goes with the seam
from penstock.core.routing_context import RoutingContext as RoutingContext  # noqa: PLC0414 - goes with the seam
from penstock.core.types import (
    CardFile,
    Delta,
    EngineInfo,
    EventMessage,
    Instance,
    InstanceChange,
    ModelCard,
    Request,
    Step,
    WorkerLoad,
)
from penstock.core.wire import HashArray


class Engine(Protocol):
    """Runs a model: token ids in, token ids out, one batched step at a time. One task owns it."""

    async def start(self) -> EngineInfo:
        """Load the model; when this returns, `submit` accepts requests.

        Raises:
            ConfigError: the model or a setting cannot work.
        """
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; its tokens come out of `steps`. What is late is aborted: an engine knows no deadline.

        Raises:
            RequestError: it can never run here (longer than the context or than all KV blocks).
            Overloaded: the queue is full.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Free the request's blocks by the end of the step under way; unknown and finished ids are no error.

        No delta of this request follows, not even a last one.
        """
        ...

    def steps(self) -> AsyncIterator[Step]:
        """Yield what each step changed; waits while there is nothing to do and ends after `close`. One consumer."""
        ...

    def load(self) -> WorkerLoad:
        """Account for every request `submit` has taken so far, also within a step."""
        ...

    async def close(self) -> None:
        """Release everything. Safe after a failed `start`, and twice."""
        ...


@runtime_checkable
class KvBlocks(Protocol):
    """What an engine offers beside `Engine` so that KV can move: its memory, and blocks held while others copy.

    A block of all layers is one contiguous run of `EngineInfo.kv_bytes_per_block` bytes. Held blocks are nobody's to
    write but the holder's, so that bytes may move while a step computes. Sync, from the event loop.
    """

    def kv_memory(self) -> object | None:
        """Give the memory of all blocks, as `penstock.transfer` registers it: block i begins at i times a block's bytes.

        None where the engine keeps none (a mock): holding and publishing are then all there is to a move.
        """
        ...

    def pin(self, block_hashes: HashArray) -> Sequence[BlockId]:
        """Hold the leading blocks that are resident.

        Args:
            block_hashes: (n, 2) uint64, chained.

        Returns:
            (m,) with m <= n: it stops at the first block that is not there.
        """
        ...

    def reserve(self, count: int) -> Sequence[BlockId] | None:
        """Hold `count` blocks to be written; None where what runs will need them."""
        ...

    def publish(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        """Put held blocks whose content is complete into the prefix cache and announce them; they stay held.

        Args:
            block_ids: (n,) each the child of the one before it.
            block_hashes: (n, 2) uint64, their names.
            parent: low64 of the block before the first, None at the root.
        """
        ...

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Let go of what `pin` or `reserve` gave, once each."""
        ...


class Registration(Protocol):
    """A worker's place in discovery; the lease is renewed until `close`."""

    async def update(self, instance: Instance) -> None:
        """Replace what watchers see, as when a worker begins to drain."""
        ...

    async def close(self) -> None:
        """Withdraw at once, without waiting for the lease to run out. Safe twice."""
        ...


class Discovery(Protocol):
    """Who serves what, kept true by leases."""

    async def register(self, instance: Instance) -> Registration:
        """Announce an instance and keep its lease.

        Raises:
            Unavailable: the registry cannot be reached.
        """
        ...

    def watch(self) -> AsyncIterator[InstanceChange]:
        """Yield what is present, then `WatchSynced`, then every change, until the iterator is closed.

        A registry that goes away is no error: the iterator waits, and yields the differences
        (ending with another `WatchSynced`) once it is back.
        """
        ...

    async def close(self) -> None: ...


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

    def abort(self, request_id: RequestId) -> None: ...

    def disconnected(self, sink: FrontendSink) -> None:
        """Abort whatever this frontend had asked for: it is gone."""
        ...

    def events_after(self, sequence: int | None) -> Sequence[EventMessage]:
        """Replay what a subscriber lacks: the batches after `sequence`, or a snapshot (None, or too long ago)."""
        ...

    def subscribe(self, sink: "EventSink") -> None:
        """Have every later `EventBatch` pushed to `sink` until `unsubscribe`."""
        ...

    def unsubscribe(self, sink: "EventSink") -> None: ...

    def read_file(self, sha256: str) -> bytes | None:
        """Give a model card's file by its content hash; None if it is not one of this worker's."""
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


class RoutingPolicy(Protocol):
    """Prices a request on every worker at once. Pure: the same context gives the same costs.

    One that goes by what it chose before is a `HistoryPolicy`: pure from one `chosen` to the next.
    """

    @property
    def name(self) -> str: ...

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        """Return (num_slots,) costs; the lowest eligible one wins, ties are broken by the request's hash."""
        ...


@runtime_checkable
class ExplainedPolicy(RoutingPolicy, Protocol):
    """A routing policy whose costs are seconds, sums of terms, so that a decision can say what it was made of.

    Terms named `queue` and `memory` say how long a request would wait there before its work begins: with them requests
    can be held (`router.hold`).
    """

    @property
    def term_names(self) -> Sequence[str]: ...

    def terms(self, context: RoutingContext) -> NDArray[np.float64]:
        """Return (num_terms, num_slots) seconds whose sums are the costs: an array of its own. Pure, as `costs` is."""
        ...


@runtime_checkable
class HistoryPolicy(RoutingPolicy, Protocol):
    """A routing policy that is told what came of its costs. It bounds what it remembers."""

    def chosen(self, context: RoutingContext, slot: int) -> None:
        """Take note that the request of this context, the last one priced, goes to `slot`."""
        ...


class RequestStream(Protocol):
    """One request under way. Leaving the context in any way cancels what is left of it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas until the one with a `finish_reason`; what came while the reader was slow is one delta.

        Raises:
            PenstockError: the request cannot be served, or not to its end.
        """
        ...


class RequestDispatcher(Protocol):
    """What a frontend needs of the deployment: which models there are, and answers from them."""

    def open(self, request: Request) -> RequestStream:
        """Prepare a request; it is sent when the context is entered."""
        ...

    def models(self) -> Mapping[str, ModelCard]:
        """Name the models that at least one ready worker serves now; a LoRA adapter is one whose card has a `parent`."""
        ...

    def expects(self, name: str) -> bool:
        """Say whether a worker that is listed, and not reached now, serves this model or adapter."""
        ...

    async def fetch_file(self, card: ModelCard, file: CardFile) -> bytes:
        """Fetch one of the card's files from any worker that has it.

        Raises:
            Unavailable: no worker answered.
        """
        ...

    def workers(self) -> Sequence[object]:
        """Describe every known worker in values that msgspec encodes; for people."""
        ...

    def explain(self, request_id: str) -> Sequence[object]:
        """Say why a request was sent where it was, as `workers` does; nothing where that is not known (any more).

        Args:
            request_id: a choice's; or an answer's, for those of all its choices.
        """
        ...

    def latest_decisions(self, most: int) -> Sequence[object]:
        """Say the same of the latest decisions, oldest first."""
        ...


class Link(Protocol):
    """The connection between two transfer agents, seen from one of them. It carries what transports say to each other.

    The agent that opened it is the initiator: it alone posts transfers over it. Messages arrive in order.
    """

    @property
    def peer(self) -> str:
        """The other agent's name."""
        ...

    @property
    def initiated(self) -> bool:
        """Whether this agent opened it."""
        ...

    @property
    def same_host(self) -> bool: ...

    @property
    def peer_pid(self) -> int:
        """The other agent's process, 0 where that is on another host."""
        ...

    @property
    def has_streams(self) -> bool:
        """Whether `open_stream` can work: not within a process."""
        ...

    @property
    def error(self) -> PenstockError | None:
        """Why the link has ended; None while it lives."""
        ...

    def send(self, transport: str, payload: bytes) -> None:
        """Have the peer's transport of this name `receive` it. Never blocks; nothing happens on a link that has ended."""
        ...

    async def open_stream(self, transport: str) -> socket.socket:
        """Connect to the peer once more and hand the connection to its transport of this name (`accept`).

        Returns:
            a connected non-blocking stream socket whose next byte is the transport's own; the caller closes it.

        Raises:
            PeerLost: nobody answers.
            TransferRefused: this link has no sockets (both agents are in one process), or the peer refuses.
        """
        ...


class TransportHost(Protocol):
    """What an agent gives to its transports."""

    @property
    def name(self) -> str: ...

    def region(self, region_id: int) -> Region:
        """Look up a region of this agent.

        Raises:
            TransferRefused: it is not registered (any more).
        """
        ...

    def authorize(
        self, peer: str, key_by_region: Mapping[int, bytes], ranges: Descriptors, op: TransferOp
    ) -> None:
        """Check that a peer may do this with this agent's regions; a refusal is counted and logged here.

        Raises:
            TransferRefused: a region is gone or was not given, a range ends outside of it, or it is read-only.
        """
        ...

    def refused(self, error: PenstockError, peer: str) -> None:
        """Count, log and keep what a peer asked for in vain, where `authorize` did not do so."""
        ...

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run a task that ends with the agent; it must not raise."""
        ...


class Move(Protocol):
    """One list of ranges in one direction over one channel, ready to be moved any number of times."""

    def run_now(self) -> bool:
        """Move everything before this returns, if that takes no longer than a turn of the loop may take.

        Returns:
            whether it was done; False has done nothing: use `run`.

        Raises:
            TransferError: it failed.
        """
        ...

    async def run(self) -> None:
        """Move everything: when this returns, all bytes are where they belong, on whichever side that is.

        A cancelled run has let go of both sides' memory before the cancellation goes on.

        Raises:
            TransferError: it failed.
        """
        ...


class TransferChannel(Protocol):
    """A transport's way to one peer, over the link that this agent opened; or to this agent's own memory."""

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        """Say why it cannot move between these; None if it can."""
        ...

    def cost(self, op: TransferOp) -> TransferCost:
        """Give what it is thought to take before anything was measured."""
        ...

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        """Work out what can be known ahead. `refusal` gave None for these regions.

        Args:
            op: the direction.
            pairs: what to move.
            checksum: whether bytes that arrive changed are an error (`ChecksumMismatch`).
        """
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """One way to move bytes between registered memory, one-sided: the peer's program takes no part.

    An agent has one of each kind and calls it from its event loop only.
    """

    @property
    def name(self) -> str: ...

    @property
    def checksums(self) -> bool:
        """Whether checksums are on where the caller does not say."""
        ...

    async def start(self, host: TransportHost) -> None:
        """Get ready.

        Raises:
            TransferError: it cannot work here; the text says why.
        """
        ...

    def contact(self) -> bytes:
        """Give what a peer has to know to connect; part of the agent's metadata, so keep it short."""
        ...

    def register(self, region_id: int, region: Region) -> bytes | None:
        """Take note of a region.

        Returns:
            what a peer has to know to reach it by this transport, or None if it is of no use here.

        Raises:
            TransferError: it would be, but cannot be registered; the text says why.
        """
        ...

    async def deregister(self, region_id: int) -> None:
        """Forget a region; what peers are doing with it ends with an error, and has ended when this returns."""
        ...

    async def connect(
        self, link: Link | None, contact: bytes, regions: Mapping[int, RegionInfo]
    ) -> TransferChannel:
        """Make a way to a peer.

        Args:
            link: to the peer, initiated here; None for this agent's own memory.
            contact: the peer's `contact()`.
            regions: what the peer gave; it grows and shrinks, so keep the mapping and no copy.

        Raises:
            TransferError: it does not work between these two; the text says why.
        """
        ...

    def receive(self, link: Link, payload: bytes) -> None:
        """Take a message of the peer's transport of the same name, on either side of a link.

        Raises:
            ProtocolError: it is none; the link ends.
        """
        ...

    def accept(self, link: Link, stream: socket.socket) -> None:
        """Own a stream that the initiator of this link opened."""
        ...

    def lost(self, link: Link, error: PenstockError) -> None:
        """The link has ended: end what uses it, on either side, with this error."""
        ...

    async def close(self) -> None:
        """Let go of everything. Safe after a failed `start`, and twice."""
        ...
