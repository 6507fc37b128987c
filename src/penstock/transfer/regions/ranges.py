"""Lists of memory ranges: copied, moved to and from other processes, checked and merged.

A list is arrays of equal length, (n,) uint64 and contiguous. Addresses are trusted: an unmapped address ends the process, so
callers check bounds first. All functions are thread-safe and release the GIL for 64 KiB and more. They are native if the
module is installed, else the `_python` reference.
"""

import ctypes
import errno
import os
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.core.native import native

Numbers: TypeAlias = NDArray[np.uint64]
Stop: TypeAlias = NDArray[np.uint8]
"""(1,) uint8; another thread sets it to end a long call early."""

_VECTORS_MAX = 1024
"""IOV_MAX of Linux."""
_PIECE_BYTES = 4 << 20
"""Bytes between two checks of `stop`."""


class ProcessMemoryError(OSError):
    """Memory of another process could not be accessed. `moved_bytes` were moved, anywhere in the list."""

    def __init__(self, number: int, what: str, moved_bytes: int) -> None:
        super().__init__(number, f"{what}: {os.strerror(number)}, after {moved_bytes} bytes")
        self.moved_bytes = moved_bytes


def copy_ranges(
    targets: Numbers, sources: Numbers, lengths: Numbers, threads: int = 1, stop: Stop | None = None
) -> bool:
    """Copy ranges of memory, each as memmove does; the order of overlapping ranges is undefined.

    From 12 MiB on it writes past the cache: on one thread 1.1 (32 KiB blocks) to 2 times (1 MiB) the speed of memcpy (2 cores
    of AMD EPYC, shared and private pages). More threads help only where one core cannot fill the memory channels.

    Args:
        targets: (n,) addresses.
        sources: (n,) addresses.
        lengths: (n,) bytes.
        threads: the most threads, with the caller's; below 256 KiB always one.
        stop: checked every 4 MiB, but not within a range that overlaps its target.

    Returns:
        whether all was copied; False if stopped.

    Raises:
        ValueError: the arrays differ in length.
        TypeError: they are not contiguous uint64.
    """
    if native is None:
        return copy_ranges_python(targets, sources, lengths, stop)
    is_done: bool = native.copy_ranges(targets, sources, lengths, threads, stop)
    return is_done


def copy_ranges_python(
    targets: Numbers, sources: Numbers, lengths: Numbers, stop: Stop | None = None
) -> bool:
    """Do what the native `copy_ranges` does."""
    for target, source, length in _rows(targets, sources, lengths):
        piece = length if abs(target - source) < length else _PIECE_BYTES
        for at in range(0, length, piece):
            if stop is not None and stop[0]:
                return False
            ctypes.memmove(target + at, source + at, min(piece, length - at))
    return True


def read_process(  # noqa: PLR0917 - the list comes first, as everywhere
    pid: int, local: Numbers, remote: Numbers, lengths: Numbers, threads: int = 1, stop: Stop | None = None
) -> None:
    """Copy ranges of another process's memory into this process, by the kernel.

    Args:
        pid: the process; the kernel requires permission to trace it (same user, and Yama).
        local: (n,) addresses in this process.
        remote: (n,) addresses in the other one.
        lengths: (n,) bytes.
        threads: the most threads, with the caller's.
        stop: checked every 4 MiB.

    Raises:
        ProcessMemoryError: an OSError. ESRCH: no such process; EPERM: not permitted; EFAULT: not mapped there;
            ECANCELED: stopped.
        ValueError: the arrays differ in length.
        TypeError: they are not contiguous uint64.
    """
    if native is None:
        moved, error = _move_process_python("process_vm_readv", pid, _rows(local, remote, lengths), stop)
    else:
        moved, error = native.read_process(pid, local, remote, lengths, threads, stop)
    if error:
        raise ProcessMemoryError(error, f"reading memory of process {pid}", moved)


def write_process(  # noqa: PLR0917
    pid: int, local: Numbers, remote: Numbers, lengths: Numbers, threads: int = 1, stop: Stop | None = None
) -> None:
    """Copy ranges of this process into another one's memory; see `read_process`."""
    if native is None:
        moved, error = _move_process_python("process_vm_writev", pid, _rows(local, remote, lengths), stop)
    else:
        moved, error = native.write_process(pid, local, remote, lengths, threads, stop)
    if error:
        raise ProcessMemoryError(error, f"writing memory of process {pid}", moved)


class _Vector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _move_process_python(
    call: str, pid: int, rows: list[tuple[int, int, int]], stop: Stop | None
) -> tuple[int, int]:
    """Move one batch of vectors after the other; returns (moved bytes, errno)."""
    move = getattr(ctypes.CDLL(None, use_errno=True), call)
    move.restype = ctypes.c_ssize_t
    rows = [row for row in reversed(rows) if row[2]]
    moved = 0
    while rows:
        if stop is not None and stop[0]:
            return moved, errno.ECANCELED
        batch = rows[: -_VECTORS_MAX - 1 : -1]
        here = (_Vector * len(batch))(*(_Vector(mine, length) for mine, _, length in batch))
        there = (_Vector * len(batch))(*(_Vector(theirs, length) for _, theirs, length in batch))
        done = move(
            pid, here, ctypes.c_ulong(len(batch)), there, ctypes.c_ulong(len(batch)), ctypes.c_ulong(0)
        )
        if done <= 0:
            return moved, ctypes.get_errno() if done else errno.EFAULT
        moved += done
        while done:
            mine, theirs, length = rows.pop()
            if length > done:
                rows.append((mine + done, theirs + done, length - done))
            done -= min(length, done)
    return moved, 0


def check_bounds(offsets: Numbers, lengths: Numbers, size: int) -> int:
    """Find the first range that is not wholly within [0, size).

    Returns:
        its index, or -1 if all are inside. A range that ends beyond 64 bits is outside; an empty range at `size` is inside.

    Raises:
        ValueError: the arrays differ in length.
        TypeError: they are not contiguous uint64.
    """
    if native is None:
        return check_bounds_python(offsets, lengths, size)
    index: int = native.check_bounds(offsets, lengths, size)
    return index


def check_bounds_python(offsets: Numbers, lengths: Numbers, size: int) -> int:
    """Do what the native `check_bounds` does."""
    expect_columns(offsets, lengths)
    limit = np.uint64(size)
    outside = (lengths > limit) | (offsets > limit - np.minimum(lengths, limit))
    return int(outside.argmax()) if outside.any() else -1


def coalesce(
    local: Numbers, remote: Numbers, lengths: Numbers, local_regions: Numbers, remote_regions: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Merge each pair of ranges into the one before it if it continues both; drop empty ones. The order stays.

    Ranges of different regions are never neighbours. A length never wraps around 64 bits.

    Args:
        local: (n,) offsets in `local_regions`.
        remote: (n,) offsets in `remote_regions`.
        lengths: (n,) bytes.
        local_regions: (n,) region ids.
        remote_regions: (n,) region ids.

    Returns:
        (local, remote, lengths, local_regions, remote_regions), each (m,) with m <= n; they own their memory.

    Raises:
        ValueError: the arrays differ in length.
        TypeError: they are not contiguous uint64.
    """
    if native is None:
        return coalesce_python(local, remote, lengths, local_regions, remote_regions)
    merged: tuple[Numbers, Numbers, Numbers, Numbers, Numbers] = native.coalesce(
        local, remote, lengths, local_regions, remote_regions
    )
    return merged


def coalesce_python(
    local: Numbers, remote: Numbers, lengths: Numbers, local_regions: Numbers, remote_regions: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Do what the native `coalesce` does."""
    expect_columns(local, remote, lengths, local_regions, remote_regions)
    full = np.flatnonzero(lengths)
    columns = tuple(column[full] for column in (local, remote, lengths, local_regions, remote_regions))
    mine, theirs, sizes, my_regions, their_regions = columns
    goes_on = (
        (mine[1:] == mine[:-1] + sizes[:-1])
        & (theirs[1:] == theirs[:-1] + sizes[:-1])
        & (my_regions[1:] == my_regions[:-1])
        & (their_regions[1:] == their_regions[:-1])
    )
    first = np.flatnonzero(np.concatenate([[True], ~goes_on])[: len(full)])
    merged = np.add.reduceat(sizes, first) if len(first) else sizes
    return mine[first], theirs[first], merged, my_regions[first], their_regions[first]


def _rows(*columns: Numbers) -> list[tuple[int, int, int]]:
    expect_columns(*columns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def expect_columns(*columns: Numbers) -> None:
    """Check columns as the native module does.

    Raises:
        ValueError: the arrays differ in length.
        TypeError: they are not contiguous uint64.
    """
    for column in columns:
        if column.dtype != np.uint64 or column.ndim != 1 or not column.flags.c_contiguous:
            raise TypeError(f"dtype {column.dtype}, shape {column.shape}: must be (n,) uint64 and contiguous")
    sizes = {len(column) for column in columns}
    if len(sizes) > 1:
        raise ValueError(f"{sorted(sizes)} of them: columns of one list are as long as each other")
