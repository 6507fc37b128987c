"""Transports: moving bytes between registered memory of two processes."""

import asyncio
import socket
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Protocol, runtime_checkable

from penstock.core.descriptors import (
    Access,
    Descriptors,
    Granted,
    Keys,
    MemoryKind,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import PenstockError


class Link(Protocol):
    """The connection between two transfer agents, seen from one of them. It carries the messages of all transports, in order.

    The agent that opened it is the initiator; only the initiator posts transfers over it.
    """

    @property
    def peer(self) -> str:
        """The other agent's name."""
        ...

    @property
    def initiated(self) -> bool:
        """Whether this agent is the initiator."""
        ...

    @property
    def same_host(self) -> bool: ...

    @property
    def peer_pid(self) -> int:
        """Process id of the other agent as the kernel knows it; 0 on another host or over TCP."""
        ...

    @property
    def has_streams(self) -> bool:
        """Whether `open_stream` works; False between two agents of one process."""
        ...

    @property
    def error(self) -> PenstockError | None:
        """Why the link has ended; None while it is alive."""
        ...

    def send(self, transport: str, payload: bytes) -> None:
        """Send a message to `receive` of the peer's transport of this name. Never blocks; does nothing on an ended link."""
        ...

    async def request(self, transport: str, keys: Keys, payload: bytes = b"") -> Granted:
        """Ask the peer's transport of this name for direct access to regions; its `grant` answers.

        Args:
            transport: name of the transport.
            keys: keys of the regions; empty for a grant without regions.
            payload: for the peer's transport.

        Returns:
            the grant; the caller closes its descriptor.

        Raises:
            TransferRefused: a key does not allow this access, or a region is gone.
            PeerLost: the peer does not answer.
            TransferError: the peer's transport cannot grant it.
        """
        ...

    async def open_stream(self, transport: str) -> socket.socket:
        """Open another connection to the peer and pass it to `accept` of the peer's transport of this name.

        Returns:
            a connected non-blocking stream socket with no bytes of the handshake left; the caller closes it.

        Raises:
            PeerLost: the peer does not answer.
            TransferRefused: both agents are in one process (`has_streams` is False), or the peer refuses.
        """
        ...


class TransportHost(Protocol):
    """A transfer agent, as its transports see it."""

    @property
    def name(self) -> str: ...

    def region(self, region_id: int) -> Region:
        """Look up a region of this agent.

        Raises:
            TransferRefused: it is not registered, or not any more.
        """
        ...

    def authorize(
        self, peer: str, key_by_region: Mapping[int, bytes], ranges: Descriptors, op: TransferOp
    ) -> None:
        """Check that a peer may run `op` on ranges of this agent's regions; counts and logs a refusal.

        Args:
            peer: name of the peer's agent.
            key_by_region: region id -> key that the peer presents.
            ranges: what it wants to access.
            op: direction, as the peer sees it.

        Raises:
            TransferRefused: a region is gone, its key does not allow `op`, or a range ends outside of it.
        """
        ...

    def refused(self, error: PenstockError, peer: str) -> None:
        """Count and log a peer's request that the transport itself refused, without `authorize`."""
        ...

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run a task until it ends or the agent closes; it must not raise."""
        ...


class Move(Protocol):
    """A prepared transfer: one list of ranges, one direction, one channel. It may run any number of times."""

    def run_now(self) -> bool:
        """Transfer everything synchronously, if that is quick enough for one turn of the event loop.

        Returns:
            True if done; False if nothing was done: use `run`.

        Raises:
            TransferError: it failed.
        """
        ...

    async def run(self) -> None:
        """Transfer everything; on return all bytes have arrived in the target's memory.

        A cancelled run stops using the memory of both sides before the cancellation propagates.

        Raises:
            TransferError: it failed.
        """
        ...


class RangeMover(Protocol):
    """Moves ranges between this agent's memory and something else: a peer's memory, its own, or its storage."""

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        """Say why it cannot move bytes between these regions; None if it can."""
        ...

    def cost(self, op: TransferOp) -> TransferCost:
        """Estimate the cost of a transfer before any was measured."""
        ...

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        """Prepare a transfer between regions for which `refusal` returned None.

        Args:
            op: the direction.
            pairs: ranges to move.
            checksum: whether to verify the bytes and raise `ChecksumMismatch`.
        """
        ...


class TransferChannel(RangeMover, Protocol):
    """One transport to one peer, over a link that this agent initiated; or to this agent's own memory."""

    def forget(self, region_id: int) -> None:
        """Let go of a region of the peer that was deregistered there; no move uses it any more."""
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """One kind of one-sided transfer between registered memory: the peer's application takes no part.

    An agent has one transport of each kind and calls it from its event loop only.
    """

    @property
    def name(self) -> str: ...

    @property
    def checksums(self) -> bool:
        """Whether transfers are checksummed if the caller does not say."""
        ...

    @property
    def setup_s(self) -> float:
        """Estimated extra seconds of the first transfer to a peer; for routers."""
        ...

    async def start(self, host: TransportHost) -> None:
        """Start the transport of one agent.

        Raises:
            TransferError: it cannot work here; the text says why.
        """
        ...

    def contact(self) -> bytes:
        """Return what a peer needs to connect. It is part of the agent's metadata, so keep it short."""
        ...

    def register(self, region_id: int, region: Region, access: Access) -> bytes | None:
        """Register a region.

        Args:
            region_id: id of the region.
            region: the memory.
            access: the most that any peer may do with it.

        Returns:
            what a peer needs to reach the region by this transport; None if this transport cannot serve such memory.

        Raises:
            TransferError: this transport serves such memory, but the registration failed; the text says why.
        """
        ...

    async def deregister(self, region_id: int) -> None:
        """Forget a region. Transfers of peers that use it end with an error before this returns.

        The agent itself waits for `lingering` uses and for peers that the region is `exposed_to`.
        """
        ...

    async def connect(
        self, link: Link | None, contact: bytes, regions: Mapping[int, RegionInfo]
    ) -> TransferChannel:
        """Open a channel to a peer.

        Args:
            link: to the peer, initiated here; None for this agent's own memory.
            contact: the peer's `contact()`.
            regions: regions that the peer has granted. The mapping changes over time: keep a reference, not a copy.

        Raises:
            TransferError: this transport does not work between these two agents; the text says why.
        """
        ...

    def receive(self, link: Link, payload: bytes) -> None:
        """Process a message of the peer's transport of the same name, on either side of a link.

        Raises:
            ProtocolError: the payload is no message; the link ends.
        """
        ...

    def accept(self, link: Link, stream: socket.socket) -> None:
        """Take ownership of a stream that the initiator of this link opened."""
        ...

    async def grant(self, link: Link, keys: Keys, payload: bytes) -> Granted:
        """Answer a `Link.request` of this link's initiator. The agent has checked `keys`.

        From then on the initiator may access these regions without this side's help, until it releases them.

        Raises:
            TransferError: the access cannot be granted; the text says why.
        """
        ...

    def exposed_to(self, link: Link) -> Collection[int]:
        """List regions that this link's initiator can access without this side's help, and without a `grant`."""
        ...

    def lingering(self, user: Link | int) -> Collection["asyncio.Future[None]"]:
        """List transfers of a region or a link that ended for their caller but may still access memory.

        An example is a cancelled transfer that the hardware cannot stop. Each future is done once the access has ended.
        """
        ...

    def lost(self, link: Link, error: PenstockError) -> None:
        """The link has ended: end everything that uses it, on either side, with this error."""
        ...

    async def close(self) -> None:
        """Release everything. Safe after a failed `start`, and twice."""
        ...


@runtime_checkable
class Storage(RangeMover, Protocol):
    """Moves bytes between an agent's main memory and its own storage, such as files; no peer takes part.

    An agent has one storage of each kind and calls it from its event loop only.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> MemoryKind:
        """The kind of its regions."""
        ...

    @property
    def checksums(self) -> bool:
        """Whether transfers are checksummed if the caller does not say."""
        ...

    def start(self, host: TransportHost) -> None:
        """Start the storage of one agent."""
        ...

    def register(self, region_id: int, region: Region) -> None:
        """Open a region of this kind. Never blocks.

        Raises:
            TransferError: the region cannot be opened; the text says why.
        """
        ...

    async def deregister(self, region_id: int) -> None:
        """Close a region of this kind; the agent has ended all its transfers."""
        ...

    def lingering(self, region_id: int) -> Collection["asyncio.Future[None]"]:
        """List transfers that ended for their caller but may still access this region; each future is done once that has ended."""
        ...

    async def close(self) -> None:
        """Release everything. Safe twice."""
        ...
