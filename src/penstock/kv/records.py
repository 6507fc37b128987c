"""Records of stored blocks: one for each slot, which says whose bytes the slot has. Memory and files have the same ones.

A record of zeros is a free slot. A record is trusted if its own checksum fits, and it names this slot, namespace and length.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.transfer.regions.checksum import Sums, checksum_ranges

RECORD = np.dtype(
    [
        ("hash", "<u8", 2),
        ("namespace", "<u8", 2),
        ("generation", "<u8"),  # higher: later
        ("parent", "<u8"),  # low64 of the block before; 0: none
        ("length", "<u4"),  # bytes of data
        ("data_sum", "<u4"),  # CRC-32C of the data
        ("slot", "<u4"),  # number of this slot + 1
        ("sum", "<u4"),  # CRC-32C of what stands before
    ]
)
Records = NDArray[np.void]
_GENERATION_MAX = 1 << 62
"""Writers count up from the highest generation that they find; one beyond this was never written."""


def seal(records: Records) -> None:
    """Write the checksum into each of (n,) contiguous records."""
    records["sum"] = _sums(records)


def are_trusted(
    records: Records, slots: NDArray[np.intp], namespace: NDArray[np.uint64], length: int
) -> NDArray[np.bool_]:
    """Say which records can be trusted.

    Args:
        records: (n,) contiguous.
        slots: (n,) the slot that each was read from.
        namespace: (2,) uint64, of the reader.
        length: bytes of a block.

    Returns:
        (n,) bool.
    """
    fits: NDArray[np.bool_] = records["slot"] == slots + 1
    fits &= (records["namespace"] == namespace).all(axis=1)
    fits &= records["length"] == length
    fits &= records["generation"] < _GENERATION_MAX
    fits &= records["sum"] == _sums(records)
    return fits


def _sums(records: Records) -> Sums:
    first = records.ctypes.data
    addresses = np.arange(len(records), dtype=np.uint64) * np.uint64(RECORD.itemsize) + np.uint64(first)
    return checksum_ranges(addresses, np.full(len(records), RECORD.itemsize - 4, np.uint64))
