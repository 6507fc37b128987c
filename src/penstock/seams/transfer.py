"""What moves bytes between registered memory of two processes."""

import asyncio
import socket
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Protocol

from penstock.core.descriptors import (
    Access,
    Descriptors,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import PenstockError


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
        """The other agent's process as the kernel names it, 0 where it does not: on another host, or over TCP."""
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
            TransferRefused: a region is gone or was not given for this, or a range ends outside of it.
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

    @property
    def setup_s(self) -> float:
        """Seconds that reaching a peer for the first time takes beyond what later transfers do, as far as is known: for routers."""
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

    def register(self, region_id: int, region: Region, access: Access) -> bytes | None:
        """Take note of a region.

        Args:
            region_id: names it.
            region: the memory.
            access: the most that peers may do with it.

        Returns:
            what a peer has to know to reach it by this transport, or None if it is of no use here.

        Raises:
            TransferError: it would be, but cannot be registered; the text says why.
        """
        ...

    async def deregister(self, region_id: int) -> None:
        """Forget a region; what peers are doing with it ends with an error, and has ended when this returns.

        What is `lingering` or done by who it was `exposed_to` is looked after by the agent.
        """
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

    def exposed_to(self, link: Link) -> Collection[int]:
        """List regions that this link's initiator may be at without this side's help, as where it has mapped them."""
        ...

    def lingering(self, user: Link | int) -> Collection["asyncio.Future[None]"]:
        """List what has ended for the caller and yet may use memory, as it cannot be taken back: of a region, or over a link.

        Each is done when it does not any more.
        """
        ...

    def lost(self, link: Link, error: PenstockError) -> None:
        """The link has ended: end what uses it, on either side, with this error."""
        ...

    async def close(self) -> None:
        """Let go of everything. Safe after a failed `start`, and twice."""
        ...
