"""Storage `file`: moves bytes between this agent's memory and its own files, which are slabs (`storage.slab`).

Peers do not reach an agent's files; they read its memory.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core.descriptors import (
    MAIN_MEMORY,
    MemoryKind,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import ConfigError, TransferRefused
from penstock.core.log import get_logger
from penstock.seams import Move, TransportHost
from penstock.transfer.regions.quarantine import call_after
from penstock.transfer.regions.regions import addresses_of, distinct
from penstock.transfer.storage.block_sums import BLOCK_BYTES
from penstock.transfer.storage.extents import Extents
from penstock.transfer.storage.io_threads import Bounce, IoThreads, Job
from penstock.transfer.storage.slab import Disk, Slab

_log = get_logger()
_GRACE_S = 0.1
"""Longest wait of a cancelled transfer for its running I/Os, which take milliseconds on a healthy disk."""
_CLOSE_S = 2.0
"""Longest wait for a file to close; afterwards its thread closes it in the background."""
_COST = TransferCost(start_s=2e-4, range_s=5e-6, bytes_per_s=2e9)
"""A virtio disk with O_DIRECT, 1 MiB at a time: 1 to 4 GB/s, measured."""


class FileRegion(Region):
    """A file of a fixed size that is read and written like memory and kept across restarts: a slab.

    Its checksums are in a second file, `path` + ".crc32c". One agent at a time has it open. Reading a block that was never
    written is an error.

    Attributes:
        path: its path; created by `register` if it does not exist.
    """

    __slots__ = ("path",)

    path: Path

    def __init__(self, path: "str | os.PathLike[str]", size_bytes: int, *, name: str = "") -> None:
        """Describe it; `register` opens it.

        Args:
            path: in an existing directory.
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


@dataclass(slots=True, eq=False)
class _OpenFile:
    """A file and its own threads, so that a file that hangs does not block others. `opening` is the job that opens the slab."""

    region: FileRegion
    threads: IoThreads
    found: Slab | None = None
    opening: Job | None = None

    @property
    def slab(self) -> Slab:
        """The slab, once it is open."""
        assert self.found is not None, f"{self.region.path} is not open"
        return self.found

    def open(self, disk: Disk) -> None:
        """Open the slab and reserve its space; may block for long.

        Raises:
            TransferError: it cannot be opened, or there is no space.
        """
        self.found = Slab(self.region.path, self.region.size_bytes, disk)
        self.found.reserve()

    def close(self) -> None:
        """Close the slab, if it was ever open; may block for long."""
        if self.found is not None:
            self.found.close()


class FileStorage:
    """Reads and writes slabs, each on its own threads."""

    name = "file"
    kind = MemoryKind.FILE
    checksums = True

    def __init__(self, *, threads: int, io_bytes: int, disk: Disk = os) -> None:
        """Start nothing yet.

        Args:
            threads: parallel reads and writes of one file: the disk's queue depth.
            io_bytes: the most that one of them moves; a multiple of 4096.
            disk: reads and writes slabs.
        """
        self.io_bytes = io_bytes
        self.host: TransportHost | None = None
        self.files: dict[int, _OpenFile] = {}
        self._disk = disk
        self._num_threads = threads
        self._jobs: dict[Job, frozenset[int]] = {}  # under way, with the regions that they use

    def start(self, host: TransportHost) -> None:
        self.host = host

    def register(self, region_id: int, region: Region) -> None:
        """Open the file on its thread, since a disk may hang in any call. Transfers wait for it, and fail with its error."""
        if not isinstance(region, FileRegion):
            raise TransferRefused("a region of kind file has to be a FileRegion")
        opened = _OpenFile(region, IoThreads(self._num_threads, self.io_bytes, "transfer-file"))
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # before there is a loop there is nothing to be kept from
            opened.open(self._disk)
        else:
            opened.opening = self.begin(
                opened, lambda _index, _bounce: opened.open(self._disk), 1, frozenset({region_id})
            )
            opened.opening.done.add_done_callback(lambda _: _tell_failure(opened))
        self.files[region_id] = opened

    async def deregister(self, region_id: int) -> None:
        """Close a file once nothing uses it; stop waiting after `_CLOSE_S`, if the disk hangs."""
        opened = self.files.pop(region_id, None)
        if opened is None:
            return
        users, closed = self.lingering(region_id), asyncio.Event()

        def close() -> None:
            job = self.begin(opened, lambda _index, _bounce: opened.close(), 1, frozenset({region_id}))
            opened.threads.close()
            job.done.add_done_callback(lambda _: closed.set())

        call_after(users, close)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await closed.wait()
        except TimeoutError:
            _log.error("slab_hangs", path=str(opened.region.path), waited_s=_CLOSE_S)

    def lingering(self, region_id: int) -> Collection["asyncio.Future[None]"]:
        return [job.done for job, used in self._jobs.items() if region_id in used]

    async def close(self) -> None:
        async with asyncio.TaskGroup() as group:
            for region_id in list(self.files):
                group.create_task(self.deregister(region_id))

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        del op
        for region in local:
            if region.kind not in MAIN_MEMORY:
                return f"storage file moves between files and main memory, and the local side is {region.kind.value}"
        for info in remote:
            if info.region_id not in self.files:
                return f"region {info.region_id}, {info.kind.value}, is no file that this agent has open"
        return None

    def cost(self, op: TransferOp) -> TransferCost:
        del op
        return _COST

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        return _FileMove(self, op, pairs, checksum=checksum)

    # -- for moves --------------------------------------------------------------------------------------------------

    def begin(
        self, opened: _OpenFile, do: Callable[[int, Bounce], None], steps: int, region_ids: frozenset[int]
    ) -> Job:
        """Run steps on a file's threads and note the regions that they use."""
        job = opened.threads.start(do, steps)
        if not job.done.done():
            self._jobs[job] = region_ids
            job.done.add_done_callback(lambda _: self._jobs.pop(job, None))
        return job

    async def finish(self, jobs: Sequence[tuple[_OpenFile, Job]]) -> None:
        """Wait for jobs. A cancellation stops them and waits `_GRACE_S`; I/Os that hang in the kernel linger.

        Raises:
            TransferError: one of them failed.
        """
        if not jobs:
            return
        waiting = [job.done for _, job in jobs]
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError:
            for opened, job in jobs:
                opened.threads.stop(job)
            await asyncio.wait(waiting, timeout=_GRACE_S)
            raise
        for _, job in jobs:
            if job.error is not None:
                raise job.error


class _FileMove:
    """A list of ranges with its planned I/Os."""

    def __init__(self, own: FileStorage, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> None:
        host = own.host
        assert host is not None, "prepared before the start"
        self._own = own
        self._op = op
        self._checksum = checksum
        local_ids, remote_ids = distinct(pairs.local.region_ids), distinct(pairs.remote.region_ids)
        self._region_ids = frozenset((*local_ids, *remote_ids))
        self._extents = Extents.plan(
            pairs.remote.region_ids,
            pairs.remote.offsets,
            addresses_of(pairs.local, {i: host.region(i).address for i in local_ids}),
            pairs.remote.lengths,
            io_bytes=own.io_bytes,
        )
        self._indices: dict[int, list[int]] = {region_id: [] for region_id in remote_ids}
        for index, region_id in enumerate(self._extents.region_ids):
            self._indices[int(region_id)].append(index)

    def run_now(self) -> bool:
        return False  # a disk takes its time, and a sick one all of it

    async def run(self) -> None:
        files = self._files()
        await _until_open(files.values())
        await self._own.finish(
            [(opened, self._begin(opened, self._indices[region_id])) for region_id, opened in files.items()]
        )
        if self._op is TransferOp.WRITE:
            await self._own.finish(
                [
                    (opened, self._own.begin(opened, _sync_of(opened.slab), 1, self._region_ids))
                    for opened in files.values()
                    if not opened.slab.is_direct
                ]
            )

    def _begin(self, opened: _OpenFile, indices: Sequence[int]) -> Job:
        slab, extents, checksum = opened.slab, self._extents, self._checksum

        def read(step: int, bounce: Bounce) -> None:
            slab.read(extents, indices[step], bounce, checksum=checksum)

        def write(step: int, bounce: Bounce) -> None:
            slab.write(extents, indices[step], bounce)

        do = read if self._op is TransferOp.READ else write
        return self._own.begin(opened, do, len(indices), self._region_ids)

    def _files(self) -> dict[int, _OpenFile]:
        try:
            return {region_id: self._own.files[region_id] for region_id in self._indices}
        except KeyError as error:
            raise TransferRefused(f"region {error.args[0]} was deregistered meanwhile") from error


async def _until_open(files: Collection[_OpenFile]) -> None:
    """Wait until all files are open. A cancellation does not stop the opening, since others wait for it too.

    Raises:
        TransferError: a file cannot be opened.
    """
    opening = [opened.opening for opened in files if opened.opening is not None]
    waiting = [job.done for job in opening if not job.done.done()]
    if waiting:
        await asyncio.wait(waiting)
    for job in opening:
        if job.error is not None:
            raise job.error


def _tell_failure(opened: _OpenFile) -> None:
    job = opened.opening
    if job is not None and job.error is not None:
        _log.error("slab_failed", path=str(opened.region.path), error=str(job.error))


def _sync_of(slab: Slab) -> Callable[[int, Bounce], None]:
    return lambda _index, _bounce: slab.sync()
