"""Transport `shm`: between processes of one host, one copy by the initiator alone.

Both processes map arenas: the owner grants the file descriptor for a region's key, open for reading only if only the read key
is shown. The unit is the arena: a peer with one region of an arena can technically access all of it. A region that is given
for writing only has no descriptor, since a writable mapping can be read. Private memory goes by process_vm_readv and
process_vm_writev, if the kernel permits them at connect; there the initiator keeps the bounds. The kernel names the peer's
process, not the metadata.
"""

import asyncio
import errno
import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.descriptors import (
    MAIN_MEMORY,
    Access,
    Descriptors,
    Granted,
    Keys,
    OffsetArray,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import PeerLost, PenstockError, TransferError, TransferRefused
from penstock.core.wire import Wire, encode
from penstock.seams import Link, Move, TransferChannel, TransportHost
from penstock.transfer.regions.arena import Arena, expect_sealed
from penstock.transfer.regions.copies import SUMMED_BYTES_MAX, CopyMove, Mapped, cut_pairs
from penstock.transfer.regions.ranges import (
    ProcessMemoryError,
    Stop,
    Sums,
    checksum_ranges,
    read_process,
    write_process,
)
from penstock.transfer.regions.regions import addresses_of, distinct, other_kind
from penstock.transfer.transports.quiet import QuietTransport
from penstock.transfer.transports.sums import answer_sums, ask_sums, compare_sums, expect_equal

_EXITING = 4
"""PF_EXITING of Linux: the process is ending."""


class OtherProcess:
    """One side is in another process; the kernel copies."""

    def __init__(self, peer: str, pid: int, op: TransferOp) -> None:
        """Know the process and the direction."""
        self._peer = peer
        self._pid = pid
        self._op = op

    def copy(
        self, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray, threads: int, stop: Stop
    ) -> None:
        try:
            if self._op is TransferOp.READ:
                read_process(self._pid, targets, sources, lengths, threads, stop)
            else:
                write_process(self._pid, sources, targets, lengths, threads, stop)
        except ProcessMemoryError as error:
            if error.errno == errno.ECANCELED:
                return
            if error.errno == errno.ESRCH:
                raise PeerLost(f"agent {self._peer} is gone: its process {self._pid} has ended") from error
            raise TransferError(
                f"agent {self._peer}: {error}; memory has to stay as long as it is registered, and the kernel must permit"
                " access (same user, and kernel.yama.ptrace_scope 0 or CAP_SYS_PTRACE): else give an Arena"
            ) from error

    def copy_summed(
        self, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray, threads: int, stop: Stop
    ) -> Sums | None:
        """Copy, and sum the side that is in this process."""
        self.copy(targets, sources, lengths, threads, stop)
        if stop[0]:
            return None
        return checksum_ranges(targets if self._op is TransferOp.READ else sources, lengths)


def why_untraceable(pid: int, address: int, nonce: bytes) -> str | None:
    """Find out whether the kernel permits access to another process's memory, by reading its nonce.

    Returns:
        None if it does, else why not.
    """
    found = np.zeros(len(nonce), np.uint8)
    here, there, length = (np.array([value], np.uint64) for value in (found.ctypes.data, address, len(nonce)))
    try:
        read_process(pid, here, there, length)
    except ProcessMemoryError as error:
        return f"the kernel refuses to read memory of process {pid} ({os.strerror(error.errno or 0)})"
    return None if found.tobytes() == nonce else f"process {pid} is not that agent's"


def is_ending(pid: int) -> bool:
    """Say whether a process is ending or has ended; the kernel may still be freeing its memory."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, _, _, _, _, _, flags = status.rpartition(b") ")[2].split(maxsplit=7)[:7]
    return state in {b"Z", b"X"} or bool(int(flags) & _EXITING)


NAME = "shm"
UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""Errors of invalid msgpack."""
_WATCH_S = 0.05
_COST = TransferCost(start_s=6e-6, range_s=2e-7, bytes_per_s=10e9)
"""A little more than that of transport `memory`, which has transfers within a process."""


_Rows = slice | NDArray[np.bool_]
"""The ranges of a list that one copy moves."""

Address = Annotated[int, msgspec.Meta(ge=0)]
"""In a peer's process; 64 bits."""


class ShmRegion(Wire, frozen=True):
    """Where a region is: its address in its process, and its offset in its arena; None in private memory."""

    address: Address
    offset: int | None = None


class MappedArena(Wire, frozen=True):
    """The arena of a granted region. Its descriptor comes with the message, open for writing too if `writable`.

    All pages of an arena that `is_resident` are allocated, so touching them allocates nothing.
    """

    size_bytes: int
    writable: bool = False
    is_resident: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Reachable:
    """A granted region of the peer. `address` is in this process if `mapping` is there, else in the peer's.

    `info` is as at the time of the grant.
    """

    number: int
    address: int
    info: RegionInfo
    mapping: NDArray[np.uint8] | None


class ChannelOwner(Protocol):
    """The part of the transport that its channels use."""

    threads: int
    inline_bytes_max: int
    executor: ThreadPoolExecutor

    def local_addresses(self, ranges: Descriptors) -> OffsetArray:
        """Give the (n,) uint64 addresses of this agent's ranges."""
        ...

    def touch(self, arena: Arena) -> None:
        """Map a peer's pages in the background."""
        ...

    def closed(self, channel: "ShmChannel") -> None:
        """Forget a channel."""
        ...


class ShmChannel:
    """The channel to one peer."""

    def __init__(
        self,
        shm: "ChannelOwner",
        link: Link,
        regions: Mapping[int, RegionInfo],
        untraceable: str | None,
    ) -> None:
        """Begin without grants.

        Args:
            shm: the transport.
            link: to the peer.
            regions: the peer's.
            untraceable: why the kernel refuses access to the peer's private memory; None if it permits it.
        """
        self.link = link
        self.shm = shm
        self.regions = regions
        self._untraceable = untraceable
        self._reachable: dict[int, _Reachable] = {}
        self._arenas: dict[tuple[int, int, bool], tuple[Arena, set[int]]] = {}  # with the regions in it
        self._numbers = count(1)
        self._asking = asyncio.Lock()
        self._copying: list[CopyMove] = []
        self._was_used = False
        self._watch: asyncio.TimerHandle | None = None
        self._lost: PeerLost | None = None

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        del op
        kind = other_kind(MAIN_MEMORY, local, remote)
        if kind is not None:
            return f"{kind.value} is no memory of a process"
        for info in remote:
            region = self._shm_region(info)
            if self._untraceable is None or (region.offset is not None and info.read_key):
                continue
            what = "private" if region.offset is None else "given without leave to map it for reading"
            return (
                f"region {info.region_id} is {what}, and {self._untraceable}; give an Arena, to be read too"
            )
        return None

    def cost(self, op: TransferOp) -> TransferCost:
        del op
        return _COST

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        return _ShmMove(self, op, pairs, checksum=checksum)

    async def close(self) -> None:
        self.end()
        self.shm.closed(self)

    def end(self) -> None:
        """Release the peer's memory; running copies keep it until they end."""
        if self._watch is not None:
            self._watch.cancel()
        self._reachable.clear()
        for arena, _ in self._arenas.values():
            arena.close()
        self._arenas.clear()

    async def copy(self, part: CopyMove, sums: Sums | None = None) -> None:
        """Run a copy that fills `sums`, and end it when the peer's process ends.

        The kernel frees the memory of a killed process before its sockets, so with gigabytes the link ends half a second late.

        Raises:
            PeerLost: the peer's process is ending.
            TransferError: the copy failed.
        """
        if self._lost is not None:
            raise self._lost
        self._was_used = True
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look)
        self._copying.append(part)
        try:
            await part.run(sums)
        finally:
            self._copying.remove(part)

    def _look(self) -> None:
        self._watch = None
        if is_ending(self.link.peer_pid):
            self._lost = PeerLost(
                f"agent {self.link.peer} is gone: its process {self.link.peer_pid} is ending; connect again once it is back"
            )
            for part in self._copying:
                part.end(self._lost)
        elif self._was_used:
            self._was_used = bool(self._copying)
            self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look)

    def forget(self, region_id: int) -> None:
        """Release a region, and its arena with the last region in it."""
        self._reachable.pop(region_id, None)
        for key, (arena, region_ids) in list(self._arenas.items()):
            region_ids.discard(region_id)
            if not region_ids:
                arena.close()
                del self._arenas[key]

    def granted(self, region_ids: Sequence[int]) -> list[_Reachable] | None:
        """Give the grants of regions; None if one is missing, or its metadata has changed."""
        known: list[_Reachable] = []
        for region_id in region_ids:
            reachable, info = self._reachable.get(region_id), self.regions.get(region_id)
            if reachable is None or (info is not reachable.info and info != reachable.info):
                return None
            known.append(reachable)
        return known

    async def ask(self, region_ids: Sequence[int]) -> list[_Reachable]:
        """Give the grants of regions, and request missing ones from the peer.

        Raises:
            TransferRefused: the peer refuses.
            PeerLost: it is gone.
        """
        found = self.granted(region_ids)
        if found is not None:
            return found
        async with self._asking:
            for region_id in region_ids:
                if self.granted([region_id]) is None:
                    self._reachable[region_id] = await self._ask(region_id)
        found = self.granted(region_ids)
        if found is None:
            raise TransferRefused(f"a region of agent {self.link.peer} was deregistered there")
        return found

    def _shm_region(self, info: RegionInfo) -> ShmRegion:
        try:
            return msgspec.msgpack.decode(info.transport_info.get(NAME, b""), type=ShmRegion)
        except UNREADABLE as error:
            raise TransferRefused(
                f"agent {self.link.peer} did not register region {info.region_id} for transport shm"
            ) from error

    async def _ask(self, region_id: int) -> _Reachable:
        info = self.regions.get(region_id)
        if info is None:
            raise TransferRefused(f"region {region_id} of agent {self.link.peer} is gone")
        region = self._shm_region(info)
        keys = {op: {region_id: info.key(op)} for op in TransferOp if info.key(op)}
        granted = await self.link.request(NAME, keys)
        if granted.descriptor is None:
            return _Reachable(next(self._numbers), region.address, info, None)
        if region.offset is None or self.regions.get(region_id) is None:
            granted.close()
            return _Reachable(next(self._numbers), region.address, info, None)
        arena = self._map(granted.descriptor, granted.payload, region_id)
        if not 0 <= region.offset <= arena.size_bytes - info.size_bytes:
            self.forget(region_id)
            raise TransferRefused(f"region {region_id} of agent {self.link.peer} ends outside of its arena")
        return _Reachable(next(self._numbers), arena.address + region.offset, info, arena.array)

    def _map(self, fd: int, payload: bytes, region_id: int) -> Arena:
        """Map an arena unless it is mapped already. Takes ownership of `fd`."""
        try:
            given = msgspec.msgpack.decode(payload, type=MappedArena)
            # first: of another file's descriptor nothing is asked, it may hang
            expect_sealed(fd, given.size_bytes)
        except UNREADABLE as error:
            os.close(fd)
            raise TransferRefused(f"agent {self.link.peer}: its arena cannot be read of: {error}") from error
        except BaseException:
            os.close(fd)
            raise
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino, given.writable
        known = self._arenas.get(key)
        if known is None:
            arena = Arena.map(fd, given.size_bytes, writable=given.writable)
            self._arenas[key] = arena, {region_id}
            if given.is_resident:
                self.shm.touch(arena)
            return arena
        os.close(fd)
        known[1].add(region_id)
        return known[0]


class _ShmMove:
    """One list of ranges. Grants are looked up at each run, since they may be revoked."""

    def __init__(self, channel: ShmChannel, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> None:
        self._channel = channel
        self._op = op
        self._pairs = pairs = cut_pairs(pairs, SUMMED_BYTES_MAX) if checksum else pairs
        self._checksum = checksum
        self._local = channel.shm.local_addresses(pairs.local)
        self._remote_ids = distinct(pairs.remote.region_ids)
        self._made_for: list[int] = []
        self._parts: list[tuple[CopyMove, _Rows]] = []

    def run_now(self) -> bool:
        if self._checksum or self._pairs.total_bytes > self._channel.shm.inline_bytes_max:
            return False
        reachable = self._channel.granted(self._remote_ids)
        if reachable is None:
            return False
        for part, _ in self._parts_for(reachable):
            part.run_now()
        return True

    async def run(self) -> None:
        reachable = await self._channel.ask(self._remote_ids)  # these keep mapped what they name
        parts = self._parts_for(reachable)
        if self._checksum:
            await self._run_summed(parts)
        else:
            for part, _ in parts:
                await self._channel.copy(part)

    async def _run_summed(self, parts: list[tuple[CopyMove, _Rows]]) -> None:
        """Copy, and compare checksums with those of the peer, which sums what is read from it during the copy."""
        channel, pairs = self._channel, self._pairs
        here, peer = self._copy_summed(parts), channel.link.peer
        if self._op is TransferOp.READ:
            await compare_sums(here, self._sums_there(), pairs.lengths, peer)
        else:
            written = await here
            expect_equal(written, await self._sums_there(), pairs.lengths, peer)

    async def _copy_summed(self, parts: list[tuple[CopyMove, _Rows]]) -> Sums:
        sums = np.zeros(len(self._pairs), np.uint32)
        for part, rows in parts:
            found = np.zeros(len(sums[rows]), np.uint32)
            await self._channel.copy(part, found)
            sums[rows] = found
        return sums

    async def _sums_there(self) -> Sums:
        return await ask_sums(self._channel.link, NAME, self._channel.regions, self._pairs.remote)

    def _parts_for(self, reachable: list[_Reachable]) -> list[tuple[CopyMove, _Rows]]:
        """Give the copies: through mapped memory, by the kernel, or both."""
        numbers = [region.number for region in reachable]  # no reference, which would keep what they map
        if numbers == self._made_for:
            return self._parts
        ranges = self._pairs.remote
        bases = dict(zip(self._remote_ids, reachable, strict=True))
        remote = addresses_of(ranges, {region_id: region.address for region_id, region in bases.items()})
        mapped = [region_id for region_id, region in bases.items() if region.mapping is not None]
        if len(mapped) in {0, len(bases)}:
            part = self._part(self._local, remote, self._pairs.lengths, is_mapped=bool(mapped))
            self._parts = [(part, slice(None))]
        else:
            inside = np.isin(ranges.region_ids, np.array(mapped, np.uint64))
            self._parts = [
                (
                    self._part(
                        self._local[rows], remote[rows], self._pairs.lengths[rows], is_mapped=is_mapped
                    ),
                    rows,
                )
                for rows, is_mapped in ((inside, True), (~inside, False))
            ]
        self._made_for = numbers
        return self._parts

    def _part(
        self, local: OffsetArray, remote: OffsetArray, lengths: OffsetArray, *, is_mapped: bool
    ) -> CopyMove:
        link = self._channel.link
        targets, sources = (local, remote) if self._op is TransferOp.READ else (remote, local)
        return CopyMove(
            targets,
            sources,
            lengths,
            executor=self._channel.shm.executor,
            threads=self._channel.shm.threads,
            inline_bytes_max=self._channel.shm.inline_bytes_max,
            checksum=False,
            reach=Mapped() if is_mapped else OtherProcess(link.peer, link.peer_pid, self._op),
        )


_NONCE_BYTES = 16
_TOUCHED_BYTES_MAX = 16 << 30
"""Arenas up to this size are touched ahead: 1.5 s of CPU time and 32 MiB of page tables."""


class _Contact(Wire, frozen=True):
    """The address of the agent's nonce; a peer that can read it can read all memory of the process."""

    address: Address
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class ShmTransport(QuietTransport):
    """Copies between processes of one host."""

    name = NAME
    checksums = False
    setup_s = 0.025
    """The first read less later ones, measured between two processes on two busy cores of an AMD EPYC."""

    def __init__(self, *, threads: int, inline_bytes_max: int) -> None:
        """Begin without regions.

        Args:
            threads: native threads that share one copy.
            inline_bytes_max: copies up to this size run within `post`.
        """
        self.threads = threads
        self.inline_bytes_max = inline_bytes_max
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="transfer-shm")
        self._toucher = ThreadPoolExecutor(1, thread_name_prefix="transfer-shm-touch")
        self._nonce = np.frombuffer(secrets.token_bytes(_NONCE_BYTES), np.uint8)
        self._arenas: dict[int, Arena] = {}  # by region
        self._channels: dict[Link, ShmChannel] = {}
        self._host: TransportHost | None = None

    async def start(self, host: TransportHost) -> None:
        self._host = host

    def contact(self) -> bytes:
        return encode(_Contact(address=self._nonce.ctypes.data, nonce=self._nonce.tobytes()))

    def register(self, region_id: int, region: Region, access: Access) -> bytes | None:
        if region.kind not in MAIN_MEMORY:
            return None
        arena = Arena.around(region.address, region.size_bytes)
        if arena is None or not arena.share(peers_write=access.allows(TransferOp.WRITE)):
            return encode(ShmRegion(address=region.address))
        self._arenas[region_id] = arena
        return encode(ShmRegion(address=region.address, offset=region.address - arena.address))

    async def deregister(self, region_id: int) -> None:
        self._arenas.pop(region_id, None)

    async def connect(
        self, link: Link | None, contact: bytes, regions: Mapping[int, RegionInfo]
    ) -> TransferChannel:
        if link is None:
            raise TransferError("within an agent, transport memory copies")
        if not link.same_host:
            raise TransferError(f"agent {link.peer} runs on another host, or in other namespaces of this one")
        if not link.peer_pid:
            raise TransferError(
                f"agent {link.peer}: over TCP the kernel does not say which process it is; have it listen at `unix` too"
            )
        try:
            found = msgspec.msgpack.decode(contact, type=_Contact)
        except UNREADABLE as error:
            raise TransferError(f"agent {link.peer}: its contact cannot be read: {error}") from error
        untraceable = why_untraceable(link.peer_pid, found.address, found.nonce)
        channel = ShmChannel(self, link, regions, untraceable)
        self._channels[link] = channel
        return channel

    async def grant(self, link: Link, keys: Keys, payload: bytes) -> Granted:
        """Give the descriptor of one region's arena if the read key is shown; a writable mapping alone could be read, too.

        A request with a payload asks for checksums instead.
        """
        if payload:
            assert self._host is not None, "started"
            return Granted(await answer_sums(self._host, link, keys, payload, self.executor))
        region_ids = {region_id for shown in keys.values() for region_id in shown}
        if len(region_ids) != 1:
            raise TransferRefused(f"agent {link.peer}: asks for {len(region_ids)} regions; one at a time")
        arena = self._arenas.get(region_ids.pop())
        if arena is None or TransferOp.READ not in keys:
            return Granted()
        writable = TransferOp.WRITE in keys
        try:
            descriptor = arena.open(writable=writable)
        except OSError as error:
            raise TransferError(f"an arena cannot be opened: {error}") from error
        return Granted(
            encode(
                MappedArena(size_bytes=arena.size_bytes, writable=writable, is_resident=arena.is_resident)
            ),
            descriptor,
        )

    def lost(self, link: Link, error: PenstockError) -> None:
        del error
        channel = self._channels.pop(link, None)
        if channel is not None:
            channel.end()

    async def close(self) -> None:
        for channel in self._channels.values():
            channel.end()
        self._channels.clear()
        self._arenas.clear()
        self.executor.shutdown(wait=False)
        self._toucher.shutdown(wait=False, cancel_futures=True)

    def local_addresses(self, ranges: Descriptors) -> OffsetArray:
        """Give the (n,) uint64 addresses of this agent's ranges."""
        assert self._host is not None
        ids = distinct(ranges.region_ids)
        return addresses_of(ranges, {region_id: self._host.region(region_id).address for region_id in ids})

    def touch(self, arena: Arena) -> None:
        """Map a peer's pages in the background, so that first transfers need not."""
        if arena.size_bytes <= _TOUCHED_BYTES_MAX:
            self._toucher.submit(arena.touch)

    def closed(self, channel: ShmChannel) -> None:
        """Forget a channel."""
        if self._channels.get(channel.link) is channel:
            del self._channels[channel.link]
