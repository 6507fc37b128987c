"""Transport `file`: between this agent's memory and its own files. See `penstock.transfer.slab` for what a file is.

A peer that wants what is in a file reads this agent's memory; its file is not its peers' business.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.core.descriptors import (
    MAIN_MEMORY,
    Access,
    MemoryKind,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import ConfigError, TransferError, TransferRefused
from penstock.seams import Link, Move, TransferChannel, TransportHost
from penstock.transfer.block_sums import BLOCK_BYTES
from penstock.transfer.extents import Extents
from penstock.transfer.io_threads import Bounce, IoThreads
from penstock.transfer.quiet import QuietTransport
from penstock.transfer.regions import addresses_of, distinct
from penstock.transfer.slab import Disk, Slab

_COST = TransferCost(start_s=2e-4, range_s=5e-6, bytes_per_s=2e9)
"""A virtio disk with O_DIRECT, 1 MiB at a time: 1 to 4 GB/s, measured."""


class FileRegion(Region):
    """A file of a fixed size that is read and written like memory: a slab, kept across restarts.

    Its checksums are kept in a second file, `path` + ".crc32c". One agent at a time has it open. What was never
    written cannot be read.

    Attributes:
        path: where it is; made when it is registered, if it is not there.
    """

    __slots__ = ("path",)

    path: Path

    def __init__(self, path: "str | os.PathLike[str]", size_bytes: int, *, name: str = "") -> None:
        """Describe it; `register` opens it.

        Args:
            path: its directory has to be there.
            size_bytes: a multiple of 4096; reserved on the disk at once.
            name: as in `Region`.

        Raises:
            ConfigError: the size is no such multiple.
        """
        if size_bytes < BLOCK_BYTES or size_bytes % BLOCK_BYTES:
            raise ConfigError(
                f"FileRegion {path}: size_bytes must be a multiple of {BLOCK_BYTES}, and not 0; got {size_bytes}"
            )
        Region.__init__(self, kind=MemoryKind.FILE, size_bytes=size_bytes, name=name)
        object.__setattr__(self, "path", Path(path))


class FileTransport(QuietTransport):
    """Reads and writes slabs on a few threads that all transfers share."""

    name = "file"
    checksums = True

    def __init__(self, *, threads: int, io_bytes: int, disk: Disk = os) -> None:
        """Start nothing yet.

        Args:
            threads: reads and writes under way at once: the disk's queue depth.
            io_bytes: the most that one of them moves; a multiple of 4096.
            disk: reads and writes slabs.
        """
        self.io_bytes = io_bytes
        self._disk = disk
        self.threads = IoThreads(threads, io_bytes, "transfer-file")
        self.host: TransportHost | None = None
        self.slabs: dict[int, Slab] = {}

    async def start(self, host: TransportHost) -> None:
        self.host = host

    def contact(self) -> bytes:
        return b""

    def register(self, region_id: int, region: Region, access: Access) -> bytes | None:
        """Open the file, which takes as long as the file system needs to reserve its space."""
        del access  # no peer reaches it
        if not isinstance(region, FileRegion):
            return b"" if region.kind in MAIN_MEMORY else None
        self.slabs[region_id] = Slab(region.path, region.size_bytes, self._disk)
        return b""

    async def deregister(self, region_id: int) -> None:
        slab = self.slabs.pop(region_id, None)
        if slab is not None:  # its agent has ended the transfers that used it, and peers have none
            await self.threads.finish(self.threads.start(lambda _index, _bounce: slab.close(), 1))

    async def connect(
        self, link: Link | None, contact: bytes, regions: Mapping[int, RegionInfo]
    ) -> TransferChannel:
        del contact, regions
        if link is not None:
            raise TransferError(
                f"files of agent {link.peer} are reached by itself only; read its memory instead"
            )
        return _FileChannel(self)

    async def close(self) -> None:
        for region_id in list(self.slabs):
            await self.deregister(region_id)
        self.threads.close()


class _FileChannel:
    def __init__(self, own: FileTransport) -> None:
        self._own = own

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        del op
        for region in local:
            if region.kind not in MAIN_MEMORY:
                return f"transport file moves between files and main memory, and the local side is {region.kind.value}"
        for info in remote:
            if info.region_id not in self._own.slabs:
                return f"region {info.region_id}, {info.kind.value}, is no file that this agent has open"
        return None

    def cost(self, op: TransferOp) -> TransferCost:
        del op
        return _COST

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        return _FileMove(self._own, op, pairs, checksum=checksum)

    async def close(self) -> None: ...


class _FileMove:
    """Its I/Os, worked out once."""

    def __init__(self, own: FileTransport, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> None:
        host = own.host
        assert host is not None, "prepared before the start"
        self._own = own
        self._op = op
        self._checksum = checksum
        self._region_ids = frozenset(distinct(pairs.remote.region_ids))
        self._extents = Extents.plan(
            pairs.remote.region_ids,
            pairs.remote.offsets,
            addresses_of(pairs.local, {i: host.region(i).address for i in distinct(pairs.local.region_ids)}),
            pairs.remote.lengths,
            io_bytes=own.io_bytes,
        )

    def run_now(self) -> bool:
        return False  # a disk takes its time, and a sick one all of it

    async def run(self) -> None:
        slabs = self._slabs()
        extents = self._extents

        def read(index: int, bounce: Bounce) -> None:
            slabs[extents.region_ids[index]].read(extents, index, bounce, checksum=self._checksum)

        def write(index: int, bounce: Bounce) -> None:
            slabs[extents.region_ids[index]].write(extents, index, bounce)

        threads = self._own.threads
        await threads.finish(threads.start(read if self._op is TransferOp.READ else write, len(extents)))
        buffered = [slab for slab in slabs.values() if not slab.is_direct]
        if self._op is TransferOp.WRITE and buffered:
            await threads.finish(threads.start(lambda index, _bounce: buffered[index].sync(), len(buffered)))

    def _slabs(self) -> dict[int, Slab]:
        try:
            return {region_id: self._own.slabs[region_id] for region_id in self._region_ids}
        except KeyError as error:
            raise TransferRefused(f"region {error.args[0]} was deregistered meanwhile") from error
