"""Ranges of memory, natively: copied, compared with bounds, joined, and summed by CRC-32C."""

import asyncio
import ctypes
import errno
import functools
import os
from typing import Any, TypeAlias

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


Sums: TypeAlias = NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78
_LANE_BYTES = 256
_SUM_BITS = 32
_ALL_ONES = 0xFFFFFFFF


def checksum_ranges(addresses: Numbers, lengths: Numbers) -> Sums:
    """Compute the checksum of each range of memory.

    Args:
        addresses: (n,) uint64; trusted.
        lengths: (n,) bytes.

    Returns:
        (n,) uint32; an empty range has 0.

    Raises:
        ValueError: the arrays differ in length.
        TypeError: they are not contiguous uint64.

    Source: Castagnoli et al. 1993, reflected, with the initial value and the final inversion of RFC 3720.
    """
    if native is None:
        return checksum_ranges_python(addresses, lengths)
    sums: Sums = native.checksum_ranges(addresses, lengths)
    return sums


def crc32c(view: NDArray[np.uint8]) -> int:
    """Compute the checksum of contiguous bytes."""
    address, length = np.array([view.ctypes.data], np.uint64), np.array([view.size], np.uint64)
    return int(checksum_ranges(address, length)[0])


def copy_summed(
    targets: Numbers, sources: Numbers, lengths: Numbers, threads: int = 1, stop: Stop | None = None
) -> Sums | None:
    """Copy ranges of memory, and compute the checksum of what each target then holds.

    One pass: a target is summed while it is in the cache, at 0.8 of memcpy's speed (256 KiB blocks, Intel Xeon).

    Args:
        targets: (n,) addresses; trusted.
        sources: (n,) addresses; trusted.
        lengths: (n,) bytes.
        threads: the most threads, with the caller's; one range is never shared.
        stop: checked every 4 MiB.

    Returns:
        (n,) uint32; None if stopped.

    Raises:
        ValueError: the arrays differ in length.
        TypeError: they are not contiguous uint64.
    """
    if native is None:
        return copy_summed_python(targets, sources, lengths, stop)
    sums: Sums | None = native.copy_summed(targets, sources, lengths, threads, stop)
    return sums


def copy_summed_python(
    targets: Numbers, sources: Numbers, lengths: Numbers, stop: Stop | None = None
) -> Sums | None:
    """Do what the native `copy_summed` does."""
    if not copy_ranges_python(targets, sources, lengths, stop):
        return None
    return checksum_ranges_python(targets, lengths)


def checksum_ranges_python(addresses: Numbers, lengths: Numbers) -> Sums:
    """Do what the native `checksum_ranges` does, at about 100 MB/s."""
    expect_columns(addresses, lengths)
    sums = np.zeros(len(lengths), np.uint32)
    for index, (address, length) in enumerate(zip(addresses.tolist(), lengths.tolist(), strict=True)):
        if length:
            buffer = (ctypes.c_uint8 * length).from_address(address)
            sums[index] = _crc32c_python(np.frombuffer(buffer, np.uint8))
    return sums


def _crc32c_python(array: NDArray[np.uint8]) -> int:
    """Sum lanes of equal length in parallel, then join neighbours until one is left.

    A sum that begins at 0 ignores leading zeros, so padding in front makes the number of lanes a power of two. The effect of
    the initial value depends on the length alone and is added last.
    """
    lanes = 1 << max((array.size - 1) // _LANE_BYTES, 0).bit_length()
    padded = np.zeros(lanes * _LANE_BYTES, np.uint8)
    padded[-array.size :] = array
    table = _byte_table()
    sums = np.zeros(lanes, np.uint32)
    for row in np.ascontiguousarray(padded.reshape(lanes, _LANE_BYTES).T):
        sums = (sums >> np.uint32(8)) ^ table[(sums ^ row) & np.uint32(0xFF)]
    power = _LANE_BYTES.bit_length() - 1
    while len(sums) > 1:
        sums = _mapped(_zeros(power), sums[::2]) ^ sums[1::2]
        power += 1
    initial = np.array([_ALL_ONES], np.uint32)
    for bit in range(array.size.bit_length()):
        if array.size >> bit & 1:
            initial = _mapped(_zeros(bit), initial)
    return int(sums[0] ^ initial[0]) ^ _ALL_ONES


@functools.cache
def _byte_table() -> Sums:
    sums = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        sums = (sums >> np.uint32(1)) ^ np.where(sums & np.uint32(1), np.uint32(_POLYNOMIAL), np.uint32(0))
    return sums


@functools.cache
def _zeros(power: int) -> Sums:
    """Give the image of each bit of a sum when 2**power zero bytes follow."""
    if power:
        return _mapped(_zeros(power - 1), _zeros(power - 1))
    bits = np.uint32(1) << np.arange(_SUM_BITS, dtype=np.uint32)
    shifted: Sums = (bits >> np.uint32(8)) ^ _byte_table()[bits & np.uint32(0xFF)]
    return shifted


def _mapped(images: Sums, sums: Sums) -> Sums:
    """Apply a linear map of sums, given by the image of each bit."""
    out = np.zeros_like(sums)
    for bit, image in enumerate(images):
        out ^= (sums >> np.uint32(bit) & np.uint32(1)) * image
    return out


async def settled(future: "asyncio.Future[Any]") -> None:
    """Wait until a future is done, ignoring its result. A cancellation is raised only after that.

    Use it for work that ends soon, such as a thread that uses memory and was told to stop.
    """
    cancellation: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancellation = error
    if not future.cancelled():
        future.exception()  # it was seen
    if cancellation is not None:
        raise cancellation
