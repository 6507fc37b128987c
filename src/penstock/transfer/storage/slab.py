"""A slab: a preallocated file that is read and written like memory, with a checksum for each block.

Whole blocks of aligned memory go to the disk directly (O_DIRECT), everything else through a thread's aligned buffer. A
partial write of a block reads, checks, changes and writes the block under a lock.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.core.errors import ChecksumMismatch, TransferError
from penstock.core.log import get_logger
from penstock.transfer.regions.checksum import Sums
from penstock.transfer.regions.ranges import copy_ranges
from penstock.transfer.storage.block_sums import BLOCK_BYTES, sum_blocks, sum_memory
from penstock.transfer.storage.extents import Extents
from penstock.transfer.storage.io_threads import Bounce
from penstock.transfer.storage.slab_sums import SlabSums

SUMS_SUFFIX = ".crc32c"
_LOCKS = 64

_MEMORY = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")
"""The address space of this process; a slice is the memory between two addresses."""


class Disk(Protocol):
    """The calls that read and write a slab's data; module `os` has them."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def fdatasync(self, fd: int, /) -> None: ...


class Slab:
    """An open slab. `read` and `write` block; several threads may call them."""

    def __init__(self, path: Path, size_bytes: int, disk: Disk = os) -> None:
        """Open and lock the slab, or create it.

        Args:
            path: of the slab; its checksums are in a file beside it.
            size_bytes: a multiple of the block.
            disk: reads and writes its data.

        Raises:
            TransferError: another process has it open, it is no slab of this size, or there is no space.
        """
        self.path = path
        self.size_bytes = size_bytes
        self._disk = disk
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._reserving = threading.Lock()
        with contextlib.ExitStack() as undo:
            try:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, self._file)
                self._lock_file()
                self._sums = self._open_sums()
                undo.callback(self._sums.close, is_durable=False)
                self._fd, self.is_direct = self._open_direct()
            except OSError as error:
                raise TransferError(self._open_failure(error)) from error
            undo.pop_all()
        self.is_reserved = not self._sums.is_new
        """Whether its space is reserved; if not, the first `reserve`, read or write does it."""
        if not self.is_direct:
            get_logger().warning(
                "slab_buffered",
                path=str(path),
                effect="the kernel's page cache keeps a second copy, and every write waits for fdatasync",
                fix="put it on a file system that has O_DIRECT, such as ext4 or xfs",
            )
        if self._sums.has_forgotten:
            get_logger().warning(
                "slab_forgotten",
                path=str(path),
                reason="the machine went down while it was open, so its last writes may be lost",
                effect="every block is unreadable until it is written again",
            )

    def read(self, extents: Extents, index: int, bounce: Bounce, *, checksum: bool) -> None:
        """Do one I/O: read its pieces into memory.

        Raises:
            ChecksumMismatch: a block was changed, or never written.
            TransferError: the disk failed.
        """
        self.reserve()
        start, end = extents.starts[index], extents.ends[index]
        pieces = slice(extents.bounds[index], extents.bounds[index + 1])
        if extents.aligned[index]:
            self._transfer(self._disk.preadv, "reading", start, _views(extents, pieces))
            if checksum:
                self._refuse(start, self._mismatches(start, _sums_of_pieces(extents, index, start, end)))
            return
        view = bounce.view[: end - start]
        self._transfer(self._disk.preadv, "reading", start, [view])
        if checksum:
            bad = self._mismatches(start, sum_memory(bounce.address, end - start))
            # Somebody else may have been writing the part of a block that we do not read.
            self._refuse(start, [block for block in bad if not self._read_locked(start, block, bounce)])
        sources = (extents.offsets[pieces] + (bounce.address - start)).astype(np.uint64)
        copy_ranges(
            extents.addresses[pieces].astype(np.uint64), sources, extents.lengths[pieces].astype(np.uint64)
        )

    def write(self, extents: Extents, index: int, bounce: Bounce) -> None:
        """Do one I/O: write its pieces and record their checksums.

        Raises:
            ChecksumMismatch: the rest of a partially written block was changed.
            TransferError: the disk failed.
        """
        self.reserve()
        start, end = extents.starts[index], extents.ends[index]
        pieces = slice(extents.bounds[index], extents.bounds[index + 1])
        if extents.aligned[index]:
            sums = _sums_of_pieces(extents, index, start, end)
            self._transfer(self._disk.pwritev, "writing", start, _views(extents, pieces))
            self._sums.record(start // BLOCK_BYTES, sums)
            return
        partial = [] if extents.whole[index] else extents.partial_blocks(index)
        with self._locked(partial):
            self._read_partial(start, partial, bounce)
            targets = (extents.offsets[pieces] + (bounce.address - start)).astype(np.uint64)
            copy_ranges(
                targets,
                extents.addresses[pieces].astype(np.uint64),
                extents.lengths[pieces].astype(np.uint64),
            )
            sums = sum_memory(bounce.address, end - start)
            self._transfer(self._disk.pwritev, "writing", start, [bounce.view[: end - start]])
            self._sums.record(start // BLOCK_BYTES, sums)

    def sync(self) -> None:
        """Wait until all that was written is on the disk.

        Raises:
            TransferError: it is not.
        """
        try:
            self._disk.fdatasync(self._fd)
        except OSError as error:
            raise TransferError(f"{self.path}: flushing failed: {_reason(error)}") from error

    def close(self) -> None:
        """Sync and close; no read or write runs any more."""
        is_durable = False
        try:
            self.sync()
            is_durable = True
        except TransferError as error:
            get_logger().error("slab_sync_failed", path=str(self.path), error=error.message)
        finally:
            self._sums.close(is_durable=is_durable and self.is_reserved)
            os.close(self._fd)
            os.close(self._file)

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TransferError(
                f"{self.path} is open in another agent or process; only one may have it open: end that process, or name another file"
            ) from error

    def _open_sums(self) -> SlabSums:
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise TransferError(f"{self.path} is not a regular file; name one, or a path where none is")
        if status.st_size == 0 and self._free_bytes() < self.size_bytes:
            raise OSError(errno.ENOSPC, "")  # at once, and not after all that is left was taken from others
        sums = SlabSums(
            self.path.with_name(self.path.name + SUMS_SUFFIX),
            self.size_bytes,
            slab_is_empty=status.st_size == 0,
        )
        if not sums.is_new and status.st_size != self.size_bytes:
            sums.close(is_durable=False)
            raise TransferError(
                f"{self.path} has {status.st_size} bytes, and not {self.size_bytes}: somebody else has changed it; delete"
                f" it and {sums.path}"
            )
        return sums

    def reserve(self) -> None:
        """Reserve the space unless it is reserved; may take seconds. Several threads may call it.

        Raises:
            TransferError: there is not enough, or the disk failed.
        """
        if self.is_reserved:
            return
        with self._reserving:
            if not self.is_reserved:
                self._take_space()
                self.is_reserved = True

    def _take_space(self) -> None:
        try:
            try:
                os.posix_fallocate(self._file, 0, self.size_bytes)
            except OSError:
                os.ftruncate(self._file, 0)
                raise
            os.fsync(self._file)
            self._sums.set_ready()
        except OSError as error:
            raise TransferError(self._open_failure(error)) from error

    def _free_bytes(self) -> int:
        disk = os.statvfs(self.path.parent)
        return disk.f_bavail * disk.f_frsize

    def _open_direct(self) -> tuple[int, bool]:
        """Open the file again, with O_DIRECT if possible: (descriptor, whether it has O_DIRECT)."""
        again = f"/proc/self/fd/{self._file}"
        fd = -1
        try:
            fd = os.open(again, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            self._disk.preadv(fd, [Bounce(BLOCK_BYTES).view], 0)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
            return os.open(again, os.O_RDWR | os.O_CLOEXEC), False
        return fd, True

    def _open_failure(self, error: OSError) -> str:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return (
                f"{self.path}: no space for {self.size_bytes} bytes, {self._free_bytes()} are free: make room, or give a"
                " smaller size_bytes"
            )
        return f"{self.path}: cannot be opened as a slab: {_reason(error)}"

    def _transfer(
        self,
        move: Callable[[int, Sequence[memoryview], int], int],
        doing: str,
        offset: int,
        views: list[memoryview],
    ) -> None:
        """Read or write all of it; the kernel may do less at a time."""
        left = sum(len(view) for view in views)
        while True:
            try:
                done = move(self._fd, views, offset)
            except OSError as error:
                raise self._failure(doing, left, offset, _reason(error)) from error
            if done == left:
                return
            done -= done % BLOCK_BYTES  # O_DIRECT goes on at a block only
            if done == 0:
                raise self._failure(doing, left, offset, "nothing moved; was the file cut off?")
            left -= done
            offset += done
            views = _without(views, done)

    def _failure(self, doing: str, num_bytes: int, offset: int, reason: str) -> TransferError:
        return TransferError(f"{self.path}: {doing} {num_bytes} bytes at {offset} failed: {reason}")

    def _mismatches(self, start: int, sums: Sums) -> list[int]:
        """List the blocks with another checksum, counted from `start`."""
        return [int(block) for block in self._sums.mismatches(start // BLOCK_BYTES, sums)]

    def _refuse(self, start: int, blocks: list[int]) -> None:
        if not blocks:
            return
        first = start // BLOCK_BYTES + blocks[0]
        what = (
            "does not fit its checksum: the disk changed it, or a write of it was cut short"
            if self._sums.recorded(first)
            else "was never written, or not since the slab was made or forgotten"
        )
        raise ChecksumMismatch(
            f"{self.path}: the block of {BLOCK_BYTES} bytes at {first * BLOCK_BYTES} {what}"
            f" ({len(blocks)} such in this read of the disk); write it anew"
        )

    def _read_locked(self, start: int, block: int, bounce: Bounce) -> bool:
        """Read a block under its lock; return whether it matches its checksum."""
        at = block * BLOCK_BYTES
        with self._locked([start // BLOCK_BYTES + block]):
            self._transfer(self._disk.preadv, "reading", start + at, [bounce.view[at : at + BLOCK_BYTES]])
            return not self._mismatches(start + at, sum_memory(bounce.address + at, BLOCK_BYTES))

    def _read_partial(self, start: int, blocks: list[int], bounce: Bounce) -> None:
        """Read the rest of partially written blocks: the disk's bytes, or zeros if a block was never written."""
        for block in blocks:
            at = block * BLOCK_BYTES - start
            view = bounce.view[at : at + BLOCK_BYTES]
            if not self._sums.recorded(block):
                view[:] = bytes(BLOCK_BYTES)
                continue
            self._transfer(self._disk.preadv, "reading", start + at, [view])
            self._refuse(
                start + at, self._mismatches(start + at, sum_memory(bounce.address + at, BLOCK_BYTES))
            )

    @contextlib.contextmanager
    def _locked(self, blocks: list[int]) -> Iterator[None]:
        """Lock blocks against partial writes of other threads."""
        with contextlib.ExitStack() as held:
            for index in sorted({block % _LOCKS for block in blocks}):  # one order for all: no deadlock
                held.enter_context(self._locks[index])
            yield


def _views(extents: Extents, pieces: slice) -> list[memoryview]:
    return [
        _MEMORY[address : address + length]
        for address, length in zip(
            extents.addresses[pieces].tolist(), extents.lengths[pieces].tolist(), strict=True
        )
    ]


def _without(views: list[memoryview], done: int) -> list[memoryview]:
    """Drop the first `done` bytes."""
    for index, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[index + 1 :]]
        done -= len(view)
    return []


def _sums_of_pieces(extents: Extents, index: int, start: int, end: int) -> Sums:
    """Give the checksum of each block of an I/O whose pieces are aligned."""
    first = extents.first_blocks[index]
    return sum_blocks(extents.block_addresses[first : first + (end - start) // BLOCK_BYTES])


def _reason(error: OSError) -> str:
    return f"{(error.strerror or str(error)).lower()} (errno {error.errno})"
