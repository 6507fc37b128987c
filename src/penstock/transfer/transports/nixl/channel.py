"""The channel of transport `nixl` to one peer: request grants, prepare lists, post them."""

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock.core.descriptors import (
    Descriptors,
    Granted,
    MemoryKind,
    OffsetArray,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import (
    PenstockError,
    ProtocolError,
    TransferError,
    TransferRefused,
)
from penstock.core.wire import Wire
from penstock.seams import Link, Move
from penstock.transfer.regions.ranges import Sums as SumArray
from penstock.transfer.regions.regions import addresses_of, distinct, other_kind
from penstock.transfer.transports.nixl.frames import Given, Known, Place, decode
from penstock.transfer.transports.nixl.thread import NONCE_BYTES, Flight, Handles, NixlThread, Plan, Rows, row
from penstock.transfer.transports.sums import ask_sums, compare_sums

_W = TypeVar("_W", bound=Wire)
NAME = "nixl"
KINDS = {MemoryKind.DRAM: "DRAM", MemoryKind.SHARED: "DRAM", MemoryKind.VRAM: "VRAM"}
"""NIXL's names of memory kinds."""
_PART_BYTES = 32 << 20
"""Bytes of one request: a few milliseconds, so that transfers take turns and a cancelled one ends soon."""
_LET_GO_S = 1.0
"""The longest wait of a cancelled transfer for its posted requests; later they linger."""
_PROBE_S = 3.0
"""The longest wait for the test read at connect."""

_PART_RANGES = 4096

Pieces = tuple[OffsetArray, OffsetArray, OffsetArray]
"""Index of each piece's range, offset in that range, and length; (n,) uint64 each."""


class ChannelOwner(Protocol):
    """The part of the transport that its channels use."""

    places: dict[int, Place]
    failed: dict[int, str]

    async def thread(self) -> NixlThread:
        """Give the thread with its NIXL agent.

        Raises:
            TransferError: NIXL does not work here.
        """
        ...

    async def sum(self, ranges: Descriptors) -> SumArray:
        """Compute the checksum of each range of this agent's own memory."""
        ...

    def leave(self, flight: Flight, link: Link, region_ids: frozenset[int]) -> None:
        """Note a transfer that has ended for its caller and may use these regions until `flight.ended`."""
        ...

    def closed(self, channel: "NixlChannel") -> None:
        """Forget a channel."""
        ...


class NixlChannel:
    """The initiator's side of one link."""

    def __init__(
        self,
        owner: "ChannelOwner",
        link: Link,
        regions: Mapping[int, RegionInfo],
        cost: Mapping[TransferOp, TransferCost],
    ) -> None:
        """Begin without grants.

        Args:
            owner: the transport.
            link: to the peer.
            regions: the peer's.
            cost: by direction.
        """
        self.link = link
        self.owner = owner
        self.places: dict[int, Place] = {}
        self.lost: asyncio.Future[PenstockError] = asyncio.get_running_loop().create_future()
        """Done with the error when the peer is gone."""
        self.remote_name = ""
        self._regions = regions
        self._cost = cost
        self._allowed: set[tuple[TransferOp, int]] = set()
        self._meeting = asyncio.Lock()

    # -- the seam -------------------------------------------------------------------------------------------------

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        del op
        kind = other_kind(KINDS, local, remote)
        if kind is not None:
            return f"{kind.value} is no memory that this transport registers with NIXL"
        for info in remote:
            if NAME not in info.transport_info:
                return f"agent {self.link.peer} did not register region {info.region_id} with NIXL"
        for side in ({KINDS[region.kind] for region in local}, {KINDS[info.kind] for info in remote}):
            if len(side) > 1:
                return "a list of both dram and vram; post one for each"
        if len({region.device for region in local}) > 1:
            return "a list of several devices; post one for each"
        return None

    def cost(self, op: TransferOp) -> TransferCost:
        return self._cost[op]

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        infos = [self._regions[region_id] for region_id in distinct(pairs.remote.region_ids)]
        if checksum and MemoryKind.VRAM in {info.kind for info in infos}:
            raise TransferRefused("nixl: no checksums of vram; post without")
        if checksum and not all(info.read_key for info in infos):
            raise TransferRefused("nixl: no checksums of a region that was given write-only; post without")
        return NixlMove(self, op, pairs, checksum=checksum)

    async def close(self) -> None:
        self.fail(TransferError(f"agent {self.link.peer}: disconnected"))
        self.owner.closed(self)

    # -- for the transport ----------------------------------------------------------------------------------------

    def fail(self, error: PenstockError) -> None:
        """End all waits, when the peer is gone."""
        if not self.lost.done():
            self.lost.set_result(error)

    # -- for moves ------------------------------------------------------------------------------------------------

    async def meet(self) -> None:
        """Load the peer's NIXL agent and test that NIXL reaches it.

        Raises:
            TransferError: NIXL does not reach it.
        """
        async with self._meeting:
            if self.remote_name:
                return
            thread = await self.owner.thread()
            answer = await self.link.request(NAME, {})
            known = _read(answer, Known, self.link.peer)
            name = await thread.call(lambda: thread.agent.loadRemoteMD(known.metadata).decode())
            try:
                await self._probe(thread, name, known)
            except BaseException:
                thread.submit(lambda: thread.agent.invalidateRemoteMD(name))
                raise
            self.remote_name = name

    async def allow(self, op: TransferOp, region_ids: Sequence[int]) -> None:
        """Request grants of regions and load them into NIXL.

        Raises:
            TransferRefused: the peer refuses.
            TransferError: NIXL fails.
        """
        await self.meet()
        async with self._meeting:
            wanted = [region_id for region_id in region_ids if (op, region_id) not in self._allowed]
            if wanted:
                await self._load(op, self._keys(wanted, op))
                self._allowed.update((op, region_id) for region_id in wanted)

    async def sum_there(self, ranges: Descriptors) -> SumArray:
        """Request checksums of ranges of the peer's memory.

        Raises:
            TransferError: the peer does not answer with them.
        """
        return await ask_sums(self.link, NAME, self._regions, ranges)

    def _keys(self, region_ids: Sequence[int], op: TransferOp) -> dict[int, bytes]:
        infos = (self._regions.get(region_id) for region_id in region_ids)
        return {info.region_id: info.key(op) for info in infos if info is not None}

    async def _probe(self, thread: NixlThread, name: str, known: Known) -> None:
        """Read the peer's nonce by NIXL."""
        found = np.zeros(NONCE_BYTES, np.uint8)
        here, there = row(found.ctypes.data, found.nbytes), row(known.address, found.nbytes)
        handles = Handles()

        def get_ready() -> Any:
            described = thread.register(here, "DRAM")
            thread.make_ready(handles, Plan("READ", name, ("DRAM", "DRAM"), (here, there), [(0, 1)]))
            return described

        described = await thread.call(get_ready)
        flight = thread.fly(handles)
        kept = [found]

        def clean_up() -> None:
            thread.deregister(described)
            kept.clear()  # what is read into stays until then

        try:
            async with asyncio.timeout(_PROBE_S):
                await asyncio.shield(flight.ended)
        except TimeoutError as error:
            raise TransferError(
                f"NIXL does not reach agent {self.link.peer}: nothing came within {_PROBE_S:g} s; see which networks UCX"
                " may use (UCX_NET_DEVICES, UCX_TLS) and whether something between the two blocks them"
            ) from error
        finally:
            thread.abandon(flight, clean_up)
        if found.tobytes() != known.nonce:
            raise TransferError(f"NIXL reads other bytes at agent {self.link.peer} than there are")

    async def _load(self, op: TransferOp, keys: dict[int, bytes]) -> None:
        thread = await self.owner.thread()
        answer = await self.link.request(NAME, {op: keys})
        given = _read(answer, Given, self.link.peer)
        if given.places.keys() != keys.keys():
            raise TransferError(
                f"agent {self.link.peer}: regions {sorted(given.places)} are no answer to {sorted(keys)}"
            )
        await thread.call(lambda: thread.agent.loadRemoteMD(given.metadata))
        self.places |= given.places

    def forget(self, region_id: int) -> None:
        self.places.pop(region_id, None)
        self._allowed -= {(op, region_id) for op in TransferOp}


class NixlMove:
    """A list of ranges, prepared by NIXL in parts. NIXL allows one run at a time."""

    def __init__(self, channel: NixlChannel, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> None:
        """Prepare nothing yet; NIXL's thread does that at the first run."""
        self._channel = channel
        self._op = op
        self._pairs = pairs
        self._checksum = checksum
        self._handles = Handles()
        self._thread: NixlThread | None = None
        self._turn = asyncio.Lock()

    def run_now(self) -> bool:
        return len(self._pairs) == 0

    async def run(self) -> None:
        async with self._turn:
            thread = self._thread if self._thread and self._handles.requests else await self._make_ready()
            await self._fly(thread)
            if self._checksum:
                await self._compare()

    async def _make_ready(self) -> NixlThread:
        channel, local, remote = self._channel, self._pairs.local, self._pairs.remote
        local_ids, remote_ids = distinct(local.region_ids), distinct(remote.region_ids)
        thread = await channel.owner.thread()
        await channel.allow(self._op, remote_ids)
        for region_id in local_ids:
            if region_id in channel.owner.failed:
                raise TransferError(f"region {region_id}: {channel.owner.failed[region_id]}")
        here, there = channel.owner.places, channel.places
        pieces, parts = cut(local.lengths)
        sides = (rows_of(local, here, pieces), rows_of(remote, there, pieces))
        kinds = (here[local_ids[0]].kind, there[remote_ids[0]].kind)
        plan = Plan(self._op.name, channel.remote_name, kinds, sides, parts)
        handles = self._handles
        await thread.call(lambda: thread.make_ready(handles, plan))
        if self._thread is None:
            weakref.finalize(self, thread.discard, handles)
        self._thread = thread
        return thread

    async def _fly(self, thread: NixlThread) -> None:
        channel = self._channel
        flight = thread.fly(self._handles)
        try:
            await asyncio.shield(flight.ended)
        except asyncio.CancelledError:
            thread.stop(flight)
            either: list[asyncio.Future[Any]] = [flight.ended, channel.lost]
            await asyncio.wait(either, timeout=_LET_GO_S, return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            if not flight.ended.done():  # it is at both sides' memory until it ends
                channel.owner.leave(flight, channel.link, frozenset(distinct(self._pairs.local.region_ids)))
                thread.abandon(flight)
                self._handles, self._thread = Handles(), None

    async def _compare(self) -> None:
        channel, pairs = self._channel, self._pairs
        here, there = channel.owner.sum(pairs.local), channel.sum_there(pairs.remote)
        await compare_sums(here, there, pairs.lengths, channel.link.peer)


def _read(answer: Granted, kind: type[_W], peer: str) -> _W:
    """Read an answer of the peer.

    Raises:
        TransferError: it is invalid.
    """
    answer.close()
    try:
        return decode(answer.payload, kind, peer)
    except ProtocolError as error:
        raise TransferError(error.message) from error


def cut(lengths: OffsetArray) -> tuple[Pieces, list[tuple[int, int]]]:
    """Cut ranges into pieces of at most `_PART_BYTES`, and group the pieces into parts of about that size.

    Returns:
        the pieces, and (first, end) of each part.
    """
    size = np.uint64(_PART_BYTES)
    counts = ((lengths + (size - np.uint64(1))) // size).astype(np.int64)
    index = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
    offsets = within.astype(np.uint64) * size
    sizes = np.minimum(size, lengths[index] - offsets)
    by_bytes = (np.cumsum(sizes) - sizes) // size
    by_ranges = np.arange(len(sizes)) // _PART_RANGES
    is_first = (np.diff(by_bytes) != 0) | (np.diff(by_ranges) != 0)
    first = [0, *(int(at) + 1 for at in np.flatnonzero(is_first))]
    return (index.astype(np.uint64), offsets, sizes), list(zip(first, [*first[1:], len(sizes)], strict=True))


def rows_of(ranges: Descriptors, places: Mapping[int, Place], pieces: Pieces) -> Rows:
    """Give (n, 3) uint64: address, length and device of each piece."""
    index, offsets, sizes = pieces
    rows = np.empty((len(index), 3), np.uint64)
    rows[:, 0] = addresses_of(ranges, {region_id: place.address for region_id, place in places.items()})[
        index
    ]
    rows[:, 0] += offsets
    rows[:, 1] = sizes
    region_ids = ranges.region_ids[index]
    for region_id in distinct(ranges.region_ids):
        rows[region_ids == region_id, 2] = places[region_id].device
    return rows
