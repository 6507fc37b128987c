"""Transport `shm`: between processes of one host, one copy by the initiator alone.

Both processes map arenas: the owner grants the file descriptor for a region's key, open for reading only if only the read key
is shown. The unit is the arena: a peer with one region of an arena can technically access all of it. A region that is given
for writing only has no descriptor, since a writable mapping can be read. Private memory goes by process_vm_readv and
process_vm_writev, if the kernel permits them at connect; there the initiator keeps the bounds. The kernel names the peer's
process, not the metadata.
"""

import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
import numpy as np

from penstock.core.descriptors import (
    MAIN_MEMORY,
    Access,
    Descriptors,
    Granted,
    Keys,
    OffsetArray,
    Region,
    RegionInfo,
    TransferOp,
)
from penstock.core.errors import PenstockError, TransferError, TransferRefused
from penstock.core.wire import Wire, encode
from penstock.seams import Link, TransferChannel, TransportHost
from penstock.transfer.regions.arena import Arena
from penstock.transfer.regions.regions import addresses_of, distinct
from penstock.transfer.transports.quiet import QuietTransport
from penstock.transfer.transports.shm.channel import (
    NAME,
    UNREADABLE,
    Address,
    MappedArena,
    ShmChannel,
    ShmRegion,
)
from penstock.transfer.transports.shm.other_process import why_untraceable
from penstock.transfer.transports.sums import answer_sums

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
