"""What the `cuda` transport does for one peer, or for its agent's own memory."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from penstock.core.descriptors import (
    MAIN_MEMORY,
    Descriptors,
    MemoryKind,
    OffsetArray,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import PenstockError, TransferError, TransferRefused, from_info
from penstock.seams import Link, Move
from penstock.transfer.regions.checksum import Sums, checksum_ranges
from penstock.transfer.regions.copies import CopyMove, on_thread
from penstock.transfer.regions.ranges import Stop
from penstock.transfer.regions.regions import addresses_of, distinct, other_kind
from penstock.transfer.transports.cuda.driver import Cuda
from penstock.transfer.transports.cuda.frames import Ask, Shared, decode_way, encode_frame
from penstock.transfer.transports.questions import Questions

KINDS = frozenset({MemoryKind.DRAM, MemoryKind.SHARED, MemoryKind.VRAM})
_NAME = "cuda"
_COST = TransferCost(start_s=5e-5, range_s=3e-6, bytes_per_s=20e9)
"""A guess for PCIe of the fourth generation, until it was measured."""


class CudaSide(Protocol):
    """The transport, as far as its channels need it."""

    @property
    def executor(self) -> Executor: ...

    @property
    def cuda(self) -> Cuda: ...

    def regions_of(self, ranges: Descriptors) -> dict[int, Region]: ...

    def addresses(self, ranges: Descriptors) -> OffsetArray: ...

    def authorize(
        self, peer: str, keys: Mapping[int, bytes], ranges: Descriptors, op: TransferOp
    ) -> None: ...

    def pin(self, regions: Mapping[int, Region], device: int) -> None: ...

    def closed(self, channel: "CudaChannel") -> None: ...


class CudaChannel:
    """A way to a peer's memory: `other` where that is in this process, else by what the peer shares of its devices."""

    def __init__(
        self, own: CudaSide, link: Link | None, regions: Mapping[int, RegionInfo], other: CudaSide | None
    ) -> None:
        """Reach nothing yet.

        Args:
            own: this agent's transport.
            link: to the peer; None for the agent's own memory.
            regions: what the peer gave.
            other: the peer's transport, if it is in this process.
        """
        self.own = own
        self.link = link
        self._regions = regions
        self._other = other
        self._error: PenstockError | None = None
        self._questions: Questions[Shared] = Questions(link.peer if link is not None else "")
        self._allowed: set[tuple[int, TransferOp]] = set()
        self._mapped: dict[
            int, tuple[int, int, int]
        ] = {}  # device, address of what is mapped, and of the region
        self._users = 0
        self._asking = asyncio.Lock()

    # -- the seam -------------------------------------------------------------------------------------------------

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        del op
        kind = other_kind(KINDS, local, remote)
        if kind is not None:
            return f"{kind.value} is no memory of a process or device"
        if (local or remote) and other_kind(MAIN_MEMORY, local, remote) is None:
            return "there is no device memory on either side"
        for info in remote:
            way = decode_way(info.ways.get(_NAME, b""))
            if way is None:
                return f"region {info.region_id} was not registered for transport cuda"
            if self._other is None:
                if info.kind is not MemoryKind.VRAM:
                    return f"region {info.region_id} is {info.kind.value} of another process"
                if self.own.cuda.device_at(way.bus_id) is None:
                    return (
                        f"region {info.region_id} is on device {way.bus_id}, which this process does not see"
                    )
        return None

    def cost(self, op: TransferOp) -> TransferCost:
        del op
        return _COST

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        return _CudaMove(self, op, pairs, checksum=checksum)

    async def close(self) -> None:
        self.end(TransferError("disconnected"))
        self.own.closed(self)

    # -- for the transport ----------------------------------------------------------------------------------------

    def answered(self, answer: Shared) -> None:
        """Take an answer of the peer.

        Raises:
            ProtocolError: nobody asked.
        """
        self._questions.answered(answer.number, answer)

    def forget(self, region_id: int) -> None:
        """Let go of a region that nothing here uses any more."""
        self._allowed -= {(region_id, op) for op in TransferOp}
        mapped = self._mapped.pop(region_id, None)
        if mapped is not None:
            self.own.executor.submit(self.own.cuda.unmap, *mapped[:2])

    def end(self, error: PenstockError) -> None:
        """Let go of the peer's memory, once nothing uses it any more."""
        self._error = self._error or error
        self._questions.end(self._error)
        if self._users == 0:
            for region_id in list(self._mapped):
                self.forget(region_id)

    # -- for moves ------------------------------------------------------------------------------------------------

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep mapped what is mapped.

        Raises:
            PenstockError: the peer is gone.
        """
        self._check_alive()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._error is not None:
                self.end(self._error)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    async def reach(self, op: TransferOp, ranges: Descriptors) -> tuple[OffsetArray, dict[int, int]]:
        """Find where the peer's ranges are in this process, and which devices its regions are on.

        Raises:
            TransferRefused: they were not given.
            TransferError: they cannot be mapped.
        """
        ids = distinct(ranges.region_ids)
        other = self._other
        if other is not None:
            if self.link is not None:
                keys = {region_id: info.key(op) for region_id, info in self._regions.items()}
                other.authorize(self.link.peer, keys, ranges, op)
            regions = other.regions_of(ranges)
            vram = {i: region.device for i, region in regions.items() if region.kind is MemoryKind.VRAM}
            return other.addresses(ranges), vram
        async with self._asking:
            for region_id in ids:
                if (region_id, op) not in self._allowed:
                    await self._map(region_id, op)
        mapped = {region_id: self._mapped[region_id] for region_id in ids if region_id in self._mapped}
        if len(mapped) < len(ids):
            raise TransferRefused("a region of the peer was deregistered there")
        addresses = addresses_of(
            ranges, {region_id: address for region_id, (_, _, address) in mapped.items()}
        )
        return addresses, {region_id: device for region_id, (device, _, _) in mapped.items()}

    def pin(self, ranges: Descriptors, device: int) -> None:
        """Pin the peer's regions that are memory of this process."""
        if self._other is not None:
            self._other.pin(self._other.regions_of(ranges), device)

    async def _map(self, region_id: int, op: TransferOp) -> None:
        info = self._regions.get(region_id)
        way = decode_way(info.ways.get(_NAME, b"")) if info is not None else None
        device = self.own.cuda.device_at(way.bus_id) if way is not None else None
        if info is None or device is None:
            raise TransferRefused(f"region {region_id} of the peer is gone")
        answer = await self._ask(
            Ask(number=self._questions.number(), region_id=region_id, key=info.key(op), op=op)
        )

        def open_it() -> None:  # and note so: the wait may be cancelled meanwhile
            base = self.own.cuda.map(device, answer.handle)
            self._mapped[region_id] = device, base, base + answer.offset

        if region_id not in self._mapped:
            await on_thread(self.own.executor, lambda _: open_it())
        self._allowed.add((region_id, op))

    async def _ask(self, ask: Ask) -> Shared:
        assert self.link is not None, "the agent's own memory is in this process"
        waiting = self._questions.ask(ask.number)
        self.link.send(_NAME, encode_frame(ask))
        answer = await waiting
        if answer.error is not None:
            raise from_info(answer.error)
        return answer


class _CudaMove:
    """A list of ranges; where they are is looked up at each run, for regions may have gone meanwhile."""

    def __init__(self, channel: CudaChannel, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> None:
        self._channel = channel
        self._op = op
        self._pairs = pairs
        self._checksum = checksum

    def run_now(self) -> bool:
        return len(self._pairs) == 0

    async def run(self) -> None:
        channel, own = self._channel, self._channel.own
        with channel.used():
            remote, there = await channel.reach(self._op, self._pairs.remote)
            regions = own.regions_of(self._pairs.local)
            here = {i: region.device for i, region in regions.items() if region.kind is MemoryKind.VRAM}
            devices = list(dict.fromkeys([*here.values(), *there.values()]))

            def get_ready(stop: Stop) -> None:
                del stop
                own.pin(regions, devices[0])
                channel.pin(self._pairs.remote, devices[0])
                for other in devices[1:]:
                    own.cuda.join(devices[0], other)

            await on_thread(own.executor, get_ready)
            local = own.addresses(self._pairs.local)
            targets, sources = (local, remote) if self._op is TransferOp.READ else (remote, local)
            copy = CopyMove(
                targets,
                sources,
                self._pairs.lengths,
                executor=own.executor,
                threads=1,
                inline_bytes_max=0,
                checksum=self._checksum,
                reach=_Device(own.cuda, devices[0]),
            )
            await copy.run()


class _Device:
    """Copies on a stream of one device."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda = cuda
        self._device = device

    def copy(
        self, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray, threads: int, stop: Stop
    ) -> None:
        del threads, stop
        self._cuda.copy(self._device, targets, sources, lengths)

    def checksums(
        self, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray
    ) -> tuple[Sums, Sums]:
        """Bring both sides to memory of the process once more, and sum them there."""
        return self._sum(sources, lengths), self._sum(targets, lengths)

    def _sum(self, addresses: OffsetArray, lengths: OffsetArray) -> Sums:
        copies = np.empty(int(lengths.sum()), np.uint8)
        here = np.cumsum(lengths) - lengths + np.uint64(copies.ctypes.data)
        self._cuda.copy(self._device, here, addresses, lengths)
        return checksum_ranges(here, lengths)
