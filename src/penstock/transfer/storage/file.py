"""Storage `file`: moves bytes between this agent's memory and its own files, which are slot files (`storage.slots`).

Peers do not reach an agent's files; they read its memory.
"""

import asyncio
import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.core.descriptors import (
    MAIN_MEMORY,
    MemoryKind,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import ChecksumMismatch, ConfigError, TransferError, TransferRefused
from penstock.core.log import get_logger
from penstock.seams import Move, TransportHost
from penstock.transfer.regions.checksum import crc32c
from penstock.transfer.regions.quarantine import call_after
from penstock.transfer.regions.regions import distinct
from penstock.transfer.storage.io_threads import Bounce, IoThreads, Job
from penstock.transfer.storage.pieces import BlockPieces, pieces_by_block
from penstock.transfer.storage.slots import ALIGNMENT, RECORD, Disk, Slots, failure

_log = get_logger()
_GRACE_S = 0.1
"""Longest wait of a cancelled transfer for its running I/Os, which take milliseconds on a healthy disk."""
_CLOSE_S = 2.0
"""Longest wait for a file to close; afterwards its thread closes it in the background."""
_COST = TransferCost(start_s=2e-4, range_s=5e-6, bytes_per_s=2e9)
"""A virtio disk with O_DIRECT, 1 MiB at a time: 1 to 4 GB/s, measured."""
BLOCK_BYTES = 256 << 10
"""Of a stored region, unless it says otherwise."""
_NAMESPACE = hashlib.blake2b(b"FileRegion", digest_size=16).digest()
_LOCKS = 64
_MEMORY = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")
"""The address space of this process; a slice is the memory between two addresses."""


class FileRegion(Region):
    """A file of a fixed size that is read and written like memory and kept across restarts: a slot file.

    Its records, with a checksum of each block, are in a second file, `path` + ".records". One agent at a time has it open. Reading
    a block that was never written is an error.

    Attributes:
        path: its path; created by `register` if it does not exist.
        block_bytes: bytes that one checksum covers, and that are read and written at once.
    """

    __slots__ = ("block_bytes", "path")

    path: Path
    block_bytes: int

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        size_bytes: int,
        *,
        block_bytes: int = BLOCK_BYTES,
        name: str = "",
    ) -> None:
        """Describe it; `register` opens it.

        Args:
            path: in an existing directory.
            size_bytes: a multiple of `block_bytes`; reserved on the disk at once.
            block_bytes: a multiple of 4096. A transfer of a part of a block reads all of it, so give the usual length of a range.
            name: as in `Region`.

        Raises:
            ConfigError: a size is no such multiple.
        """
        check_sizes(f"FileRegion {path}", size_bytes, block_bytes)
        Region.__init__(self, kind=MemoryKind.FILE, size_bytes=size_bytes, name=name)
        object.__setattr__(self, "path", Path(path))
        object.__setattr__(self, "block_bytes", block_bytes)


def check_sizes(what: str, size_bytes: int, block_bytes: int) -> None:
    """Check the sizes of a stored region.

    Raises:
        ConfigError: a block is not a multiple of 4096 bytes, or the region not one of its blocks.
    """
    if block_bytes < ALIGNMENT or block_bytes % ALIGNMENT:
        raise ConfigError(
            f"{what}: block_bytes must be a multiple of {ALIGNMENT}, and not 0; got {block_bytes}"
        )
    if size_bytes < block_bytes or size_bytes % block_bytes:
        raise ConfigError(
            f"{what}: size_bytes must be a multiple of block_bytes, which is {block_bytes}, and not 0; got {size_bytes}"
        )


@dataclass(slots=True, eq=False)
class _OpenFile:
    """A file and its own threads, so that a file that hangs does not block others. `opening` is the job that opens it."""

    region: FileRegion
    threads: IoThreads
    slots: Slots | None = None
    opening: Job | None = None
    locks: list[threading.Lock] = field(default_factory=lambda: [threading.Lock() for _ in range(_LOCKS)])

    def open(self, disk: Disk) -> None:
        """Open the file and reserve its space; may block for long.

        Raises:
            TransferError: it cannot be opened, or there is no space.
        """
        region = self.region
        try:
            self.slots = Slots(
                region.path,
                region.block_bytes,
                region.size_bytes // region.block_bytes,
                _NAMESPACE,
                "a FileRegion",
                disk=disk,
                trusts_crashes=False,
            )
        except ConfigError as error:
            raise TransferError(error.message) from error
        except OSError as error:
            raise failure(region.path, "opening", error) from error

    def read(self, pieces: BlockPieces, bounce: Bounce, *, checksum: bool) -> None:
        """Read a block into memory; blocks, and several threads may call it.

        Raises:
            ChecksumMismatch: its bytes do not fit its checksum, or it was never written.
            TransferError: the disk failed.
        """
        view, address = self._memory_of(pieces, bounce)
        with self.locks[pieces.block % _LOCKS]:
            self._read(pieces.block, view, checksum=checksum)
        if address == bounce.address:
            pieces.scatter(address)

    def write(self, pieces: BlockPieces, bounce: Bounce) -> None:
        """Write memory to a block; what is written in part for the first time has zeros elsewhere.

        Raises:
            ChecksumMismatch: the rest of a block that is written in part does not fit its checksum.
            TransferError: the disk failed.
        """
        slots, block = self._open_slots(), pieces.block
        view, address = self._memory_of(pieces, bounce)
        with self.locks[block % _LOCKS]:
            if address == bounce.address:
                if not pieces.covers(len(view)):
                    if slots.records["slot"][block]:
                        self._read(block, view, checksum=True)
                    else:
                        view[:] = bytes(len(view))
                pieces.gather(address)
            record = np.zeros(1, RECORD)
            record["slot"], record["length"], record["namespace"] = block + 1, len(view), slots.namespace
            record["data_sum"] = crc32c(np.frombuffer(view, np.uint8))
            slots.records[block] = 0
            try:
                slots.write(block, view, record)
            except OSError as error:
                raise failure(self.region.path, f"writing block {block}", error) from error
            slots.records[block] = record[0]

    def close(self) -> None:
        """Close the file, if it was ever open; may block for long."""
        if self.slots is not None:
            try:
                self.slots.close(is_flushed=True)
            except OSError as error:
                _log.warning(
                    "slot_file_not_flushed",
                    path=str(self.region.path),
                    error=str(failure(self.region.path, "flushing", error)),
                    effect="if the machine goes down before it is opened again, it is forgotten",
                )

    def _read(self, block: int, view: memoryview, *, checksum: bool) -> None:
        slots = self._open_slots()
        try:
            slots.read(block, view)
        except OSError as error:
            raise failure(self.region.path, f"reading block {block}", error) from error
        record = slots.records[block]
        if checksum and not (record["slot"] and record["data_sum"] == crc32c(np.frombuffer(view, np.uint8))):
            what = (
                "does not fit its checksum: the disk changed it, or a write of it was cut short"
                if record["slot"]
                else "was never written, or not since the file was made or forgotten"
            )
            raise ChecksumMismatch(
                f"{self.region.path}: the block of {len(view)} bytes at {block * len(view)} {what}; write it anew"
            )

    def _memory_of(self, pieces: BlockPieces, bounce: Bounce) -> tuple[memoryview, int]:
        """Give the memory to move a block by, and its address: its target or source itself where that is possible."""
        size, address = self.region.block_bytes, int(pieces.addresses[0])
        if len(pieces.lengths) == 1 and pieces.lengths[0] == size and address % ALIGNMENT == 0:
            return _MEMORY[address : address + size], address
        return bounce.view[:size], bounce.address

    def _open_slots(self) -> Slots:
        assert self.slots is not None, f"{self.region.path} is not open"
        return self.slots


class FileStorage:
    """Reads and writes slot files, each on its own threads."""

    name = "file"
    kind = MemoryKind.FILE
    checksums = True

    def __init__(self, *, threads: int, disk: Disk = os) -> None:
        """Start nothing yet.

        Args:
            threads: parallel reads and writes of one file: the disk's queue depth.
            disk: reads and writes the files.
        """
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
        opened = _OpenFile(region, IoThreads(self._num_threads, region.block_bytes, "transfer-file"))
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
            _log.error("slot_file_hangs", path=str(opened.region.path), waited_s=_CLOSE_S)

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
    """A list of ranges with the blocks that they touch."""

    def __init__(self, own: FileStorage, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> None:
        host = own.host
        assert host is not None, "prepared before the start"
        self._own = own
        self._op = op
        self._checksum = checksum
        local_ids, remote_ids = distinct(pairs.local.region_ids), distinct(pairs.remote.region_ids)
        self._region_ids = frozenset((*local_ids, *remote_ids))
        addresses = {region_id: host.region(region_id).address for region_id in local_ids}
        self._pieces = {
            region_id: pieces_by_block(pairs, region_id, own.files[region_id].region.block_bytes, addresses)
            for region_id in remote_ids
        }

    def run_now(self) -> bool:
        return False  # a disk takes its time, and a sick one all of it

    async def run(self) -> None:
        try:
            files = {region_id: self._own.files[region_id] for region_id in self._pieces}
        except KeyError as error:
            raise TransferRefused(f"region {error.args[0]} was deregistered meanwhile") from error
        await _until_open(files.values())
        await self._own.finish(
            [(opened, self._begin(opened, self._pieces[region_id])) for region_id, opened in files.items()]
        )

    def _begin(self, opened: _OpenFile, pieces: Sequence[BlockPieces]) -> Job:
        def read(step: int, bounce: Bounce) -> None:
            opened.read(pieces[step], bounce, checksum=self._checksum)

        def write(step: int, bounce: Bounce) -> None:
            opened.write(pieces[step], bounce)

        do = read if self._op is TransferOp.READ else write
        return self._own.begin(opened, do, len(pieces), self._region_ids)


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
        _log.error("slot_file_failed", path=str(opened.region.path), error=str(job.error))
