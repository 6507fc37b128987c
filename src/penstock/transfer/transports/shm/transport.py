"""Transport `shm`: between processes of one host, one copy by the initiator alone.

Arenas are mapped by both: the owner hands out the file descriptor after the region's key was shown, so that who has
it was given it, open for reading alone where the region was given to read. The unit is the arena: who is given one region
of an arena can technically reach all of it. What was given to write and not to read has no descriptor, since a mapping that
can be written can be read. Private memory is reached by process_vm_readv and process_vm_writev where the kernel permits
them, which is found out when agents meet; there the kernel's permission is the border, and bounds are kept by the
initiator. Whose memory that is says the kernel (the process that listens at the other end), and not the metadata.
"""

import os
import secrets
import socket
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
import numpy as np

from penstock.core.descriptors import (
    MAIN_MEMORY,
    Access,
    Descriptors,
    OffsetArray,
    Region,
    RegionInfo,
    TransferOp,
)
from penstock.core.errors import PeerLost, PenstockError, ProtocolError, TransferError, TransferRefused
from penstock.core.log import get_logger
from penstock.core.wire import Wire, encode
from penstock.seams import Link, TransferChannel, TransportHost
from penstock.transfer.regions.arena import Arena
from penstock.transfer.regions.regions import addresses_of, distinct
from penstock.transfer.transports.quiet import ContainedTransport
from penstock.transfer.transports.shm.channel import Address, ShmChannel, ShmWay
from penstock.transfer.transports.shm.grants import UNREADABLE, Ask, Grant, GrantStream
from penstock.transfer.transports.shm.other_process import why_untraceable

_log = get_logger()
_NONCE_BYTES = 16
_TOUCHED_BYTES_MAX = 16 << 30
"""Of an arena: about 1.5 s of CPU time, and 32 MiB of page tables. A larger one is touched where it is used."""


class _Contact(Wire, frozen=True):
    """Where the agent's nonce lies: who can read it there may read all of its memory."""

    address: Address
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class _Gone(Wire, frozen=True):
    """A region was deregistered: unmap its arena."""

    region_id: int


class ShmTransport(ContainedTransport):
    """Copies between processes of one host."""

    name = "shm"
    checksums = False
    setup_s = 0.025
    """What the first read took beyond later ones between two processes on two busy cores of an AMD EPYC, measured."""

    def __init__(self, *, threads: int, inline_bytes_max: int) -> None:
        """Know nothing yet.

        Args:
            threads: native threads that share one copy.
            inline_bytes_max: up to so many bytes are copied within `post`.
        """
        self.threads = threads
        self.inline_bytes_max = inline_bytes_max
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="transfer-shm")
        self._toucher = ThreadPoolExecutor(1, thread_name_prefix="transfer-shm-touch")
        self._nonce = np.frombuffer(secrets.token_bytes(_NONCE_BYTES), np.uint8)
        self._arenas: dict[int, Arena] = {}  # by region
        self._told: dict[int, set[Link]] = {}  # who was granted a region
        self._serving: dict[Link, GrantStream] = {}
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
            return encode(ShmWay(address=region.address))
        self._arenas[region_id] = arena
        return encode(ShmWay(address=region.address, offset=region.address - arena.address))

    async def deregister(self, region_id: int) -> None:
        self._arenas.pop(region_id, None)
        for link in self._told.pop(region_id, ()):
            link.send(self.name, encode(_Gone(region_id=region_id)))

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
        stream = GrantStream(await link.open_stream(self.name), takes_fds=True)
        untraceable = why_untraceable(link.peer_pid, found.address, found.nonce)
        channel = ShmChannel(self, link, regions, stream, untraceable)
        self._channels[link] = channel
        return channel

    def receive(self, link: Link, payload: bytes) -> None:
        channel = self._channels.get(link)
        if not link.initiated:
            raise ProtocolError(f"agent {link.peer}: a message for transport shm, which asks over streams")
        try:
            gone = msgspec.msgpack.decode(payload, type=_Gone)
        except UNREADABLE as error:
            raise ProtocolError(f"agent {link.peer}, transport shm: {error}") from error
        if channel is not None:
            channel.forget(gone.region_id)

    def accept(self, link: Link, stream: socket.socket) -> None:
        if link in self._serving or self._host is None:
            stream.close()
            raise TransferRefused(f"agent {link.peer}: transport shm has a stream of this link already")
        grants = self._serving[link] = GrantStream(stream, takes_fds=False)
        self._host.spawn(self._serve(link, grants))

    def exposed_to(self, link: Link) -> Collection[int]:
        return [region_id for region_id, told in self._told.items() if link in told]

    def lost(self, link: Link, error: PenstockError) -> None:
        del error
        for told in self._told.values():
            told.discard(link)
        serving = self._serving.get(link)
        if serving is not None:
            serving.close()
        channel = self._channels.pop(link, None)
        if channel is not None:
            channel.end()

    async def close(self) -> None:
        for serving in self._serving.values():
            serving.close()
        for channel in self._channels.values():
            channel.end()
        self._channels.clear()
        self._arenas.clear()
        self._told.clear()
        self.executor.shutdown(wait=False)
        self._toucher.shutdown(wait=False, cancel_futures=True)

    def local_addresses(self, ranges: Descriptors) -> OffsetArray:
        """Give (n,) uint64: where ranges of this agent are."""
        assert self._host is not None
        ids = distinct(ranges.region_ids)
        return addresses_of(ranges, {region_id: self._host.region(region_id).address for region_id in ids})

    def touch(self, arena: Arena) -> None:
        """Look up a peer's pages beside everything else, so that the first transfers need not."""
        if arena.size_bytes <= _TOUCHED_BYTES_MAX:
            self._toucher.submit(arena.touch)

    def closed(self, channel: ShmChannel) -> None:
        """Forget a channel."""
        if self._channels.get(channel.link) is channel:
            del self._channels[channel.link]

    async def _serve(self, link: Link, stream: GrantStream) -> None:
        """Answer a peer's questions until it leaves."""
        try:
            while True:
                ask = await stream.receive(Ask)
                grant, fd = self._answer(link, ask, sends_fds=stream.sends_fds)
                try:
                    stream.send(grant, fd)
                finally:
                    if fd is not None:
                        os.close(fd)
        except PeerLost:
            pass  # it left
        except ProtocolError as error:
            _log.warning("shm_stream_refused", peer=link.peer, error=error.message)
        finally:
            self._serving.pop(link, None)
            stream.close()

    def _answer(self, link: Link, ask: Ask, *, sends_fds: bool) -> tuple[Grant, int | None]:
        """Decide, and open the arena for who may have it."""
        assert self._host is not None
        keys = ask.keys
        writable = TransferOp.WRITE in keys
        try:
            for op, key in keys.items() or {TransferOp.READ: b""}.items():
                self._host.authorize(link.peer, {ask.region_id: key}, Descriptors.of(ask.region_id, 0, 0), op)
            arena, fd = self._arenas.get(ask.region_id), None
            if arena is not None and sends_fds and TransferOp.READ in keys:
                fd = arena.open(writable=writable)
        except TransferError as error:
            return Grant(number=ask.number, error=error.to_info()), None
        except OSError as error:
            failure = TransferError(f"the arena of region {ask.region_id} cannot be opened: {error}")
            return Grant(number=ask.number, error=failure.to_info()), None
        self._told.setdefault(ask.region_id, set()).add(link)
        if arena is None or fd is None:
            return Grant(number=ask.number), None
        grant = Grant(
            number=ask.number,
            arena_bytes=arena.size_bytes,
            writable=writable,
            has_fd=True,
            is_resident=arena.is_resident,
        )
        return grant, fd
