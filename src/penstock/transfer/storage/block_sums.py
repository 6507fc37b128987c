"""Stored bytes are checked block by block: a checksum for each 4 KiB, and none for what was never written."""

import numpy as np

from penstock.core.descriptors import OffsetArray
from penstock.transfer.regions.checksum import Sums, checksum_ranges

BLOCK_BYTES = 4096
"""What one checksum covers, and what O_DIRECT is aligned to here."""

NOT_RECORDED = 0
"""In place of a checksum: the block was never written. No block sums up to it; see `sum_blocks`."""

_LENGTHS = np.full(256, BLOCK_BYTES, np.uint64)  # of the blocks in 1 MiB: there are seldom more


def sum_blocks(addresses: OffsetArray) -> Sums:
    """Sum the blocks at these addresses.

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
    """Sum the blocks of one stretch of memory: (length // BLOCK_BYTES,), as `sum_blocks` does."""
    return sum_blocks(np.arange(address, address + length, BLOCK_BYTES, dtype=np.uint64))
