"""Divides the ranges of a transfer by the blocks of a stored region that they touch."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.core.descriptors import RangePairs
from penstock.transfer.regions.ranges import copy_ranges
from penstock.transfer.regions.regions import addresses_of

Column = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockPieces:
    """The pieces of memory that a transfer moves to or from one block.

    Attributes:
        block: number of the block in its region.
        offsets: (n,) where each piece begins in the block, ascending.
        addresses: (n,) where it begins in memory.
        lengths: (n,) bytes.
    """

    block: int
    offsets: Column
    addresses: Column
    lengths: Column

    def covers(self, block_bytes: int) -> bool:
        """Whether the pieces have every byte of the block."""
        reach = np.maximum.accumulate(self.offsets + self.lengths)
        is_joined = self.offsets[0] == 0 and (self.offsets[1:] <= reach[:-1]).all()
        return bool(is_joined and reach[-1] == block_bytes)

    def gather(self, address: int) -> None:
        """Copy the pieces to a block in memory at `address`."""
        copy_ranges(self.offsets + np.uint64(address), self.addresses, self.lengths)

    def scatter(self, address: int) -> None:
        """Copy a block in memory at `address` to the pieces."""
        copy_ranges(self.addresses, self.offsets + np.uint64(address), self.lengths)


def pieces_by_block(
    pairs: RangePairs, region_id: int, block_bytes: int, address_by_region: Mapping[int, int]
) -> list[BlockPieces]:
    """Divide the ranges in one stored region by its blocks, in the order of the region. Empty ranges have no pieces.

    Args:
        pairs: of memory (local) and stored regions (remote).
        region_id: the stored region.
        block_bytes: bytes of its blocks.
        address_by_region: of the memory.
    """
    mine = (pairs.remote.region_ids == np.uint64(region_id)) & (pairs.remote.lengths > 0)
    if not mine.any():
        return []
    offsets, addresses, lengths = (
        column[mine].astype(np.int64)
        for column in (
            pairs.remote.offsets,
            addresses_of(pairs.local, address_by_region),
            pairs.remote.lengths,
        )
    )
    ends = offsets + lengths
    counts = (ends - 1) // block_bytes - offsets // block_bytes + 1
    owner = np.repeat(np.arange(len(offsets)), counts)
    blocks = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks += offsets[owner] // block_bytes
    starts = np.maximum(offsets[owner], blocks * block_bytes)
    sizes = np.minimum(ends[owner], (blocks + 1) * block_bytes) - starts
    memory = addresses[owner] + (starts - offsets[owner])
    order = np.lexsort((starts, blocks))
    blocks = blocks[order]
    inner, memory, sizes = (
        column[order].astype(np.uint64) for column in (starts % block_bytes, memory, sizes)
    )
    bounds = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(blocks)]
    return [
        BlockPieces(int(blocks[first]), inner[first:end], memory[first:end], sizes[first:end])
        for first, end in pairwise(bounds)
    ]
