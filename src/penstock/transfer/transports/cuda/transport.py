"""Transport `cuda`: device memory to and from memory of this process, other devices, and devices' memory of its host's processes.

One copy by the initiator, on a stream of its own, which a thread waits for asleep. Memory of a process is pinned when it
is first used. Another process's device memory is mapped by CUDA IPC after the region's key was shown; the unit is what
the allocator took from the driver, so who is given one region can technically reach what lies beside it.

It does not wait for streams of yours: what these still write, or read, has to be done before a transfer is posted.
"""

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar
from weakref import WeakValueDictionary

from penstock.core.descriptors import (
    Access,
    Descriptors,
    MemoryKind,
    OffsetArray,
    Region,
    RegionInfo,
    TransferOp,
)
from penstock.core.errors import PenstockError, ProtocolError, TransferError, TransferRefused
from penstock.core.log import get_logger
from penstock.seams import Link, TransferChannel, TransportHost
from penstock.transfer.regions.regions import addresses_of, distinct
from penstock.transfer.transports.cuda.channel import KINDS, CudaChannel
from penstock.transfer.transports.cuda.driver import Cuda, CudaDriver
from penstock.transfer.transports.cuda.frames import Ask, CudaWay, Gone, Shared, decode_frame, encode_frame
from penstock.transfer.transports.quiet import ContainedTransport

_log = get_logger()
_CONTACT_BYTES = 8


class CudaTransport(ContainedTransport):
    """Copies to and from device memory."""

    name = "cuda"
    checksums = False
    setup_s = 0.025
    """A guess: keys and handles go to and fro as with `shm`."""
    by_contact: ClassVar["WeakValueDictionary[bytes, CudaTransport]"] = WeakValueDictionary()
    """Every started one of this process."""

    def __init__(self, load: Callable[[], Cuda] = CudaDriver) -> None:
        """Know nothing yet.

        Args:
            load: loads the driver; raises TransferError where there is none.
        """
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="transfer-cuda")
        self._load = load
        self._cuda: Cuda | None = None
        self._host: TransportHost | None = None
        self._contact = secrets.token_bytes(_CONTACT_BYTES)
        self._regions: dict[int, Region] = {}
        self._pinned: dict[
            int, tuple[int, int] | None
        ] = {}  # device and address by region; None: it cannot be
        self._lock = threading.Lock()  # of what is pinned: threads pin
        self._told: dict[int, set[Link]] = {}  # who was granted a region
        self._channels: dict[Link, CudaChannel] = {}

    async def start(self, host: TransportHost) -> None:
        self._cuda = await asyncio.get_running_loop().run_in_executor(self.executor, self._load)
        self._host = host
        self.by_contact[self._contact] = self

    def contact(self) -> bytes:
        return self._contact

    def register(self, region_id: int, region: Region, access: Access) -> bytes | None:
        del access  # shown keys are checked whenever a peer asks
        if region.kind not in KINDS:
            return None
        self._regions[region_id] = region
        bus_id = self.cuda.bus_id(region.device) if region.kind is MemoryKind.VRAM else ""
        return encode_frame(CudaWay(address=region.address, bus_id=bus_id))

    async def deregister(self, region_id: int) -> None:
        self._regions.pop(region_id, None)
        for link in self._told.pop(region_id, ()):
            link.send(self.name, encode_frame(Gone(region_id=region_id)))
        await asyncio.get_running_loop().run_in_executor(self.executor, self._unpin, region_id)

    async def connect(
        self, link: Link | None, contact: bytes, regions: Mapping[int, RegionInfo]
    ) -> TransferChannel:
        if link is None:
            return CudaChannel(self, None, regions, self)
        if not link.same_host:
            raise TransferError(f"agent {link.peer} runs on another host; nixl reaches device memory there")
        other = self.by_contact.get(contact) if link.peer_pid == os.getpid() else None
        channel = self._channels[link] = CudaChannel(self, link, regions, other)
        return channel

    def receive(self, link: Link, payload: bytes) -> None:
        frame = decode_frame(payload, link.peer)
        if isinstance(frame, Ask):
            if link.initiated:
                raise ProtocolError(f"agent {link.peer}: asks for memory over a link that it did not open")
            if self._host is not None:
                self._host.spawn(self._answer(link, frame))
            return
        channel = self._channels.get(link)
        if channel is None:
            return
        if isinstance(frame, Gone):
            channel.forget(frame.region_id)
        else:
            channel.answered(frame)

    def accept(self, link: Link, stream: socket.socket) -> None:
        stream.close()
        raise TransferRefused(f"agent {link.peer}: transport cuda uses no streams")

    def exposed_to(self, link: Link) -> Collection[int]:
        if link.peer_pid == os.getpid():
            return self._regions
        return [region_id for region_id, told in self._told.items() if link in told]

    def lost(self, link: Link, error: PenstockError) -> None:
        for told in self._told.values():
            told.discard(link)
        channel = self._channels.pop(link, None)
        if channel is not None:
            channel.end(error)

    async def close(self) -> None:
        self.by_contact.pop(self._contact, None)
        for channel in list(self._channels.values()):
            await channel.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.executor.shutdown)  # what is to be unmapped is unmapped first
        cuda, self._cuda = self._cuda, None
        if cuda is not None:
            await loop.run_in_executor(None, self._let_go, cuda)

    # -- for channels ---------------------------------------------------------------------------------------------

    @property
    def cuda(self) -> Cuda:
        if self._cuda is None:
            raise TransferError("transport cuda is closed")
        return self._cuda

    def regions_of(self, ranges: Descriptors) -> dict[int, Region]:
        """Find the regions of this agent's own ranges.

        Raises:
            TransferRefused: one is gone.
        """
        found = {}
        for region_id in distinct(ranges.region_ids):
            region = self._regions.get(region_id)
            if region is None:
                raise TransferRefused(f"region {region_id} is not registered (any more)")
            found[region_id] = region
        return found

    def addresses(self, ranges: Descriptors) -> OffsetArray:
        """Give (n,) uint64: where ranges of this agent are."""
        regions = self.regions_of(ranges)
        return addresses_of(ranges, {region_id: region.address for region_id, region in regions.items()})

    def authorize(self, peer: str, keys: Mapping[int, bytes], ranges: Descriptors, op: TransferOp) -> None:
        """Check what a peer of the same process asks for.

        Raises:
            TransferRefused: it was not given that.
        """
        if self._host is None:
            raise TransferRefused("transport cuda is not started")
        self._host.authorize(peer, keys, ranges, op)

    def pin(self, regions: Mapping[int, Region], device: int) -> None:
        """Pin what is memory of a process and not pinned yet; from threads of the executor."""
        with self._lock:
            for region_id, region in regions.items():
                if region.kind is MemoryKind.VRAM or region_id in self._pinned:
                    continue
                try:
                    self.cuda.pin(device, region.address, region.size_bytes)
                    self._pinned[region_id] = device, region.address
                except (
                    TransferError
                ) as error:  # read-only, pinned by somebody else, or more than the host allows
                    self._pinned[region_id] = None
                    _log.warning("memory_not_pinned", size_bytes=region.size_bytes, error=error.message)

    def closed(self, channel: CudaChannel) -> None:
        """Forget a channel."""
        if channel.link is not None:
            self._channels.pop(channel.link, None)

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _answer(self, link: Link, ask: Ask) -> None:
        try:
            self.authorize(link.peer, {ask.region_id: ask.key}, Descriptors.of(ask.region_id, 0, 0), ask.op)
            region = self._regions.get(ask.region_id)
            if region is None or region.kind is not MemoryKind.VRAM:
                raise TransferRefused(f"region {ask.region_id} is no device memory")
            self._told.setdefault(ask.region_id, set()).add(link)
            handle, offset = await asyncio.get_running_loop().run_in_executor(
                self.executor, self.cuda.share, region.device, region.address
            )
            answer = Shared(number=ask.number, handle=handle, offset=offset)
        except TransferError as error:
            answer = Shared(number=ask.number, error=error.to_info())
        link.send(self.name, encode_frame(answer))

    def _unpin(self, region_id: int) -> None:
        with self._lock:
            pinned = self._pinned.pop(region_id, None)
            if pinned is not None:
                self.cuda.unpin(*pinned)

    def _let_go(self, cuda: Cuda) -> None:
        with self._lock:
            every, self._pinned = self._pinned, {}
            for pinned in every.values():
                if pinned is not None:
                    cuda.unpin(*pinned)
        cuda.close()
