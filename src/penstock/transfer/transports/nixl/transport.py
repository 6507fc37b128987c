"""Transport `nixl`: NVIDIA's NIXL over UCX, for RDMA, NVLink, TCP and memory of this host.

The wheel is optional, and NIXL is loaded when a peer needs it. Each agent has a NIXL agent. NIXL's metadata goes over the
link, so the agent's metadata stays short. An owner grants NIXL's keys only for regions whose keys the peer shows.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.descriptors import (
    Access,
    Descriptors,
    Granted,
    Keys,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import (
    PenstockError,
    TransferError,
    TransferRefused,
)
from penstock.core.wire import encode
from penstock.seams import Link, TransferChannel, TransportHost
from penstock.transfer.regions.quarantine import call_after
from penstock.transfer.regions.ranges import Sums as SumArray
from penstock.transfer.regions.ranges import checksum_ranges
from penstock.transfer.regions.regions import addresses_of
from penstock.transfer.transports.nixl.channel import KINDS, NAME, NixlChannel
from penstock.transfer.transports.nixl.frames import Given, Known, Place
from penstock.transfer.transports.nixl.thread import Flight, NixlThread, find_modules, load_bindings, row
from penstock.transfer.transports.quiet import QuietTransport
from penstock.transfer.transports.sums import answer_sums

_CONTACT = b"1"
"""The version of this transport's payloads."""
_UNLINKED_AGENTS_MAX = 64
"""The most NIXL agents of peers that stay loaded without a link."""
_READ, _WRITE = TransferOp.READ, TransferOp.WRITE
_SETUP_S = 1.0
"""Measured as for `shm`: 0.5 to 2 s, most of it to load NIXL on both sides."""
_SAME_HOST = TransferCost(start_s=2e-4, range_s=1e-6, bytes_per_s=8e9, setup_s=_SETUP_S)
"""Between hosts NIXL is loaded at connect."""
_COSTS = {
    "same host": {_READ: _SAME_HOST, _WRITE: _SAME_HOST},
    "rdma": dict.fromkeys((_READ, _WRITE), TransferCost(start_s=1e-4, range_s=2e-7, bytes_per_s=20e9)),
    "tcp": {
        _READ: TransferCost(start_s=3e-4, range_s=5e-6, bytes_per_s=1.2e9),
        _WRITE: TransferCost(start_s=3e-4, range_s=5e-6, bytes_per_s=3e9),
    },
}
"""UCX between two processes of a host, and over its TCP: measured, 2 cores of an AMD EPYC. RDMA: a guess."""
_RDMA_DEVICES = Path("/sys/class/infiniband")


class NixlTransport(QuietTransport):
    """Moves bytes by NIXL."""

    name = NAME
    checksums = False
    setup_s = _SETUP_S

    def __init__(
        self, find: Callable[[], object] = find_modules, bindings: Callable[[], Any] = load_bindings
    ) -> None:
        """Load nothing yet.

        Args:
            find: raises TransferError if NIXL is not installed.
            bindings: imports NIXL's bindings.
        """
        self.places: dict[int, Place] = {}
        """Addresses of this agent's regions."""
        self.failed: dict[int, str] = {}
        """Why NIXL does not take regions of this agent."""
        self._find = find
        self._bindings = bindings
        self._host: TransportHost | None = None
        self._owners: dict[int, object] = {}
        self._registered: dict[int, Any] = {}  # NIXL's lists; its thread's own
        self._opening: asyncio.Lock = asyncio.Lock()
        self._thread: NixlThread | None = None
        self._channels: dict[Link, NixlChannel] = {}
        self._lingering: dict[Flight, tuple[Link, frozenset[int]]] = {}
        self._unlinked: dict[str, None] = {}  # agents that NIXL knows and no link led to, the oldest first
        self._summing: set[asyncio.Future[SumArray]] = set()

    async def start(self, host: TransportHost) -> None:
        self._find()
        self._host = host

    def contact(self) -> bytes:
        return _CONTACT

    def register(self, region_id: int, region: Region, access: Access) -> bytes | None:
        del access  # shown keys are checked whenever a peer asks
        kind = KINDS.get(region.kind)
        if kind is None:
            return None
        self.places[region_id] = Place(kind=kind, address=region.address, device=region.device)
        self._owners[region_id] = region
        if self._thread is not None:
            self._submit_region(self._thread, region_id, region)
        return b""

    async def deregister(self, region_id: int) -> None:
        self.places.pop(region_id, None)
        self.failed.pop(region_id, None)
        if self._summing:
            await asyncio.wait(self._summing)
        thread = self._thread

        def forget() -> None:
            described = self._registered.pop(region_id, None)
            if described is not None and thread is not None:
                thread.deregister(described)

        users = self.lingering(region_id)
        if thread is not None and users:  # NIXL is still at it
            call_after(users, lambda: thread.submit(forget))
            call_after(users, lambda: self._owners.pop(region_id, None))
            return
        if thread is not None:
            await thread.call(forget)
        self._owners.pop(region_id, None)

    async def connect(
        self, link: Link | None, contact: bytes, regions: Mapping[int, RegionInfo]
    ) -> TransferChannel:
        if link is None:
            raise TransferError("NIXL moves between agents; within one, others do")
        if contact != _CONTACT:
            raise TransferError(
                f"agent {link.peer} speaks version {contact!r} of nixl, this one {_CONTACT!r}"
            )
        where = "same host" if link.same_host else "rdma" if _has_rdma() else "tcp"
        channel = self._channels[link] = NixlChannel(self, link, regions, _COSTS[where])
        if not link.same_host:  # there it is seldom the fastest, so NIXL is loaded when it is used
            try:
                await channel.meet()
            except BaseException:
                await channel.close()
                raise
        return channel

    def lost(self, link: Link, error: PenstockError) -> None:
        channel = self._channels.get(link)
        if channel is not None:
            channel.fail(error)
            self.closed(channel)

    def lingering(self, user: Link | int) -> Collection["asyncio.Future[None]"]:
        return [
            flight.ended
            for flight, (link, region_ids) in self._lingering.items()
            if link is user or user in region_ids
        ]

    async def close(self) -> None:
        async with self._opening:
            thread, self._thread, self._host = self._thread, None, None
        if thread is not None:
            await thread.close()
        self._owners.clear()

    # -- for channels ---------------------------------------------------------------------------------------------

    async def thread(self) -> NixlThread:
        """Give the thread with its NIXL agent; the first call starts both.

        Raises:
            TransferError: NIXL does not work here.
        """
        async with self._opening:
            if self._host is None:
                raise TransferError("nixl is closed")
            if self._thread is None:
                thread = NixlThread(f"{self._host.name}-{secrets.token_hex(4)}", self._bindings)
                try:
                    await thread.open()
                except BaseException:
                    await thread.close()
                    raise
                self._thread = thread
                for region_id in self.places:
                    self._submit_region(thread, region_id, self._host.region(region_id))
            return self._thread

    async def sum(self, ranges: Descriptors) -> SumArray:
        """Compute the checksum of each range of this agent's own memory."""
        bases = {region_id: place.address for region_id, place in self.places.items()}
        work = asyncio.get_running_loop().run_in_executor(
            None, checksum_ranges, addresses_of(ranges, bases), np.ascontiguousarray(ranges.lengths)
        )
        self._summing.add(work)
        work.add_done_callback(self._summing.discard)
        return await work

    def leave(self, flight: Flight, link: Link, region_ids: frozenset[int]) -> None:
        """Note a transfer that has ended for its caller and may use these regions of this agent until `flight.ended`."""
        self._lingering[flight] = link, region_ids
        flight.ended.add_done_callback(lambda _: self._lingering.pop(flight, None))

    def closed(self, channel: NixlChannel) -> None:
        """Forget a channel. Its NIXL agent stays loaded until many others were loaded after it.

        UCX keeps a connection to every agent that it reached as long as both processes live, and opens another one for an
        agent that was unloaded and loaded again. A peer that comes back reuses its connection.
        """
        if self._channels.pop(channel.link, None) is None or not channel.remote_name:
            return
        self._unlinked.pop(channel.remote_name, None)
        self._unlinked[channel.remote_name] = None
        met = {other.remote_name for other in self._channels.values()}
        thread = self._thread
        while len(self._unlinked) > _UNLINKED_AGENTS_MAX and thread is not None and not self._lingering:
            name = next(iter(self._unlinked))
            del self._unlinked[name]
            if name not in met:
                thread.submit(partial(thread.forget_agent, name))

    # -- for peers ------------------------------------------------------------------------------------------------

    async def grant(self, link: Link, keys: Keys, payload: bytes) -> Granted:
        """Answer a request: without regions with NIXL's agent, with ranges in `payload` with checksums, else with NIXL's keys."""
        if payload:
            assert self._host is not None, "started"
            return Granted(await answer_sums(self._host, link, keys, payload, None))
        region_ids = [region_id for shown in keys.values() for region_id in shown]
        thread = await self.thread()
        if not region_ids:
            whole = await thread.call(lambda: thread.export([thread.probe], has_agent=True))
            nonce = thread.nonce
            return Granted(encode(Known(metadata=whole, nonce=nonce.tobytes(), address=nonce.ctypes.data)))

        def export() -> bytes:
            described = [(region_id, self._registered.get(region_id)) for region_id in region_ids]
            for region_id, found in described:
                if found is None:
                    why = self.failed.get(region_id, "it is gone")
                    raise TransferRefused(f"region {region_id} of agent {thread.name}: {why}")
            return thread.export([found for _, found in described])

        metadata = await thread.call(export)
        places = {region_id: self.places[region_id] for region_id in region_ids if region_id in self.places}
        return Granted(encode(Given(metadata=metadata, places=places)))

    def _submit_region(self, thread: NixlThread, region_id: int, region: Region) -> None:
        def register() -> None:
            whole = row(region.address, region.size_bytes, region.device)
            try:
                self._registered[region_id] = thread.register(whole, KINDS[region.kind])
            except Exception as error:  # noqa: BLE001 - told to whoever uses the region
                self.failed[region_id] = f"NIXL does not register it: {thread.worded(error).message}"

        thread.submit(register)


def _has_rdma() -> bool:
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
