"""Checksums of stored blocks: one for each 4 KiB that was ever written."""

import numpy as np

from penstock.core.descriptors import OffsetArray
from penstock.transfer.regions.checksum import Sums, checksum_ranges

BLOCK_BYTES = 4096
"""Bytes of one checksum, and the alignment of O_DIRECT."""

NOT_RECORDED = 0
"""The block was never written. No block has this checksum; see `sum_blocks`."""

_LENGTHS = np.full(256, BLOCK_BYTES, np.uint64)  # of the blocks in 1 MiB: there are seldom more


def sum_blocks(addresses: OffsetArray) -> Sums:
    """Compute the checksums of the blocks at these addresses.

    Args:
        addresses: (n,) uint64.

    Returns:
        (n,) uint32, crc32c, with 1 in place of 0.
    """
    count = len(addresses)
    lengths = _LENGTHS[:count] if count <= len(_LENGTHS) else np.full(count, BLOCK_BYTES, np.uint64)
    sums = checksum_ranges(addresses, lengths)
    return np.maximum(sums, 1, out=sums)


def sum_memory(address: int, length: int) -> Sums:
    """Compute the (length // BLOCK_BYTES,) checksums of contiguous blocks; see `sum_blocks`."""
    return sum_blocks(np.arange(address, address + length, BLOCK_BYTES, dtype=np.uint64))
