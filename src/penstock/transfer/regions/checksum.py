"""CRC-32C of memory ranges: the checksum of iSCSI, ext4 and NVMe, so other tools can check stored bytes.

It detects every change of up to 32 adjacent bits and misses others with probability 2**-32. It does not protect against
deliberate changes.
"""

import ctypes
import functools
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.core.native import native
from penstock.transfer.regions.ranges import Numbers, Stop, copy_ranges_python, expect_columns

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
