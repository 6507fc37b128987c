"""Plans the I/Os of a list of ranges: few large aligned reads or writes. A plan is used any number of times.

Ranges are sorted by offset, cut at multiples of `io_bytes`, and joined if their 4 KiB blocks touch. So scattered ranges of a
dense slab become large I/Os, and large ranges become several parallel I/Os.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.descriptors import OffsetArray
from penstock.transfer.storage.block_sums import BLOCK_BYTES

_REGION_SHIFT = 47  # bytes of a file: 128 TiB; 65,536 files in one list


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """I/Os, each over whole blocks of one region, and the pieces of memory that each of them moves.

    Attributes:
        region_ids: (n,) one for each I/O.
        starts: (n,) bytes from the start of the region, a multiple of the block.
        ends: (n,) bytes, likewise.
        bounds: (n + 1,) I/O i moves the pieces from bounds[i] to bounds[i + 1].
        aligned: (n,) whether its pieces are aligned for O_DIRECT.
        whole: (n,) whether the pieces cover its blocks completely.
        offsets: (m,) of each piece, in the region; sorted within an I/O.
        addresses: (m,) of each piece, in memory.
        lengths: (m,) bytes.
        first_blocks: (n,) where in `block_addresses` the blocks of an I/O begin.
        block_addresses: (k,) uint64, in memory, of each whole block's worth of a piece; blocks where pieces are aligned.
    """

    region_ids: list[int]
    starts: list[int]
    ends: list[int]
    bounds: list[int]
    aligned: list[bool]
    whole: list[bool]
    offsets: NDArray[np.int64]
    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]
    first_blocks: list[int]
    block_addresses: OffsetArray

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def plan(
        cls,
        region_ids: OffsetArray,
        offsets: OffsetArray,
        addresses: OffsetArray,
        lengths: OffsetArray,
        *,
        io_bytes: int,
    ) -> "Extents":
        """Work out the I/Os of a list; empty ranges need none.

        Args:
            region_ids: (n,) of the files.
            offsets: (n,) where each range begins in its file.
            addresses: (n,) where it begins in memory.
            lengths: (n,) bytes.
            io_bytes: the most that one I/O moves, a multiple of the block.
        """
        assert io_bytes % BLOCK_BYTES == 0, io_bytes
        regions, starts, memory, sizes = _cut(
            region_ids.astype(np.int64),
            offsets.astype(np.int64),
            addresses.astype(np.int64),
            lengths.astype(np.int64),
            io_bytes,
        )
        if len(starts) == 0:
            return cls([], [], [], [0], [], [], starts, memory, sizes, [], np.empty(0, np.uint64))
        cell = starts // io_bytes
        # All regions on one line, each in its own stretch, so that nothing of two regions touches.
        rank = np.concatenate([[0], np.cumsum(regions[1:] != regions[:-1])])
        shift = rank << _REGION_SHIFT
        starts += shift
        stops = starts + sizes
        reach = np.maximum.accumulate(stops)  # ranges may overlap: the pieces so far end here
        end_block = -(-reach // BLOCK_BYTES)
        begins = np.concatenate(
            [[True], (starts[1:] // BLOCK_BYTES > end_block[:-1]) | (cell[1:] != cell[:-1])]
        )
        first = np.flatnonzero(begins)
        last = np.concatenate([first[1:], [len(starts)]]) - 1

        on_block = (starts % BLOCK_BYTES == 0) & (stops % BLOCK_BYTES == 0) & (memory % BLOCK_BYTES == 0)
        follows = np.concatenate([[False], starts[1:] == stops[:-1]])
        covered = np.concatenate([[False], starts[1:] <= reach[:-1]])
        whole = np.logical_and.reduceat(covered | begins, first)
        whole &= (starts[first] % BLOCK_BYTES == 0) & (reach[last] % BLOCK_BYTES == 0)
        blocks = sizes // BLOCK_BYTES
        until = np.cumsum(blocks)
        in_piece = np.arange(until[-1]) - np.repeat(until - blocks, blocks)
        return cls(
            region_ids=regions[first].tolist(),
            starts=(starts[first] // BLOCK_BYTES * BLOCK_BYTES - shift[first]).tolist(),
            ends=(end_block[last] * BLOCK_BYTES - shift[last]).tolist(),
            bounds=[*first.tolist(), len(starts)],
            aligned=np.logical_and.reduceat(on_block & (follows | begins), first).tolist(),
            whole=whole.tolist(),
            offsets=starts - shift,
            addresses=memory,
            lengths=sizes,
            first_blocks=(until - blocks)[first].tolist(),
            block_addresses=(np.repeat(memory, blocks) + in_piece * BLOCK_BYTES).astype(np.uint64),
        )

    def partial_blocks(self, index: int) -> list[int]:
        """List the blocks of an I/O that its pieces cover only in part, in order."""
        pieces = slice(self.bounds[index], self.bounds[index + 1])
        starts = self.offsets[pieces]
        reach = np.maximum.accumulate(starts + self.lengths[pieces])
        hole_starts = np.concatenate([[self.starts[index]], reach])
        hole_ends = np.concatenate([starts, [self.ends[index]]])
        holes = hole_ends > hole_starts
        # A hole never contains a whole block, else there would be two I/Os: it touches one block or two.
        touched = np.union1d(hole_starts[holes] // BLOCK_BYTES, (hole_ends[holes] - 1) // BLOCK_BYTES)
        return [int(block) for block in touched]


def _cut(
    region_ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    addresses: NDArray[np.int64],
    lengths: NDArray[np.int64],
    io_bytes: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut ranges at multiples of `io_bytes` and sort them by region and offset: (regions, starts, memory, sizes)."""
    full = np.flatnonzero(lengths)
    region_ids, offsets, addresses, lengths = (
        column[full] for column in (region_ids, offsets, addresses, lengths)
    )
    ends = offsets + lengths
    cells = (ends - 1) // io_bytes - offsets // io_bytes + 1
    owner = np.repeat(np.arange(len(offsets)), cells)
    cell = np.arange(len(owner)) - np.repeat(np.cumsum(cells) - cells, cells) + offsets[owner] // io_bytes
    starts = np.maximum(offsets[owner], cell * io_bytes)
    sizes = np.minimum(ends[owner], (cell + 1) * io_bytes) - starts
    memory = addresses[owner] + (starts - offsets[owner])
    regions = region_ids[owner]
    order = np.lexsort((starts, regions))
    return regions[order], starts[order], memory[order], sizes[order]
