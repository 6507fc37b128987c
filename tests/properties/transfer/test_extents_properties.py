"""I/Os against the bytes that they stand for, one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.transfer.storage.block_sums import BLOCK_BYTES
from penstock.transfer.storage.extents import Extents

IO_BYTES = 3 * BLOCK_BYTES
SIZE = 8 * BLOCK_BYTES
MEMORY = 1 << 30

near_edge = st.builds(
    lambda block, by: block * BLOCK_BYTES + by, st.integers(0, 7), st.sampled_from([0, 0, 1, 512, 4095])
)
offset = st.one_of(near_edge, st.integers(0, SIZE - 1))
length = st.one_of(st.sampled_from([0, 1, 511, BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES]), near_edge)
memory = st.builds(
    lambda block, by: MEMORY + block * BLOCK_BYTES + by, st.integers(0, 99), st.sampled_from([0, 0, 0, 8])
)
ranges = st.lists(
    st.tuples(st.integers(1, 3), offset, memory, length).map(
        lambda row: (*row[:3], min(row[3], SIZE - row[1]))
    ),
    max_size=12,
)


@given(ranges)
@settings(max_examples=25)
def test_extents_move_every_byte_once_and_know_what_they_cover(rows: list[tuple[int, int, int, int]]) -> None:
    columns = np.array(rows, np.uint64).reshape(-1, 4).T
    extents = Extents.plan(*columns, io_bytes=IO_BYTES)

    moved = []
    blocks_seen: set[tuple[int, int]] = set()
    for index, (region, start, end) in enumerate(
        zip(extents.region_ids, extents.starts, extents.ends, strict=True)
    ):
        assert start % BLOCK_BYTES == end % BLOCK_BYTES == 0
        assert 0 < end - start <= IO_BYTES
        assert start // IO_BYTES == (end - 1) // IO_BYTES
        blocks = {(region, block) for block in range(start // BLOCK_BYTES, end // BLOCK_BYTES)}
        assert not blocks & blocks_seen, "two I/Os write the same block"
        blocks_seen |= blocks
        covered = np.zeros(end - start, bool)
        tiles = True
        at = start
        parts = []
        for piece in range(extents.bounds[index], extents.bounds[index + 1]):
            begin, address, size = (
                int(column[piece]) for column in (extents.offsets, extents.addresses, extents.lengths)
            )
            assert start <= begin < begin + size <= end
            parts.append(_bytes(region, begin, address, size))
            covered[begin - start : begin - start + size] = True
            tiles &= begin == at and begin % BLOCK_BYTES == size % BLOCK_BYTES == address % BLOCK_BYTES == 0
            at = begin + size
        moved += parts
        by_block = covered.reshape(-1, BLOCK_BYTES)
        assert by_block.any(axis=1).all(), "a block is read or written for nothing"
        assert extents.aligned[index] == tiles
        if tiles:
            first = extents.first_blocks[index]
            found = extents.block_addresses[first : first + len(by_block)]
            assert np.array_equal(found, np.concatenate([part[::BLOCK_BYTES, 2] for part in parts]))
        assert extents.whole[index] == covered.all()
        partial = np.flatnonzero(~by_block.all(axis=1)) + start // BLOCK_BYTES
        assert extents.partial_blocks(index) == partial.tolist()
    assert np.array_equal(_sorted(moved), _sorted([_bytes(*row) for row in rows]))


def _bytes(region: int, at: int, address: int, size: int) -> np.ndarray:
    """Name each byte of a range: (size, 3)."""
    steps = np.arange(size)
    return np.stack([np.full(size, region), at + steps, address + steps], axis=1)


def _sorted(parts: list[np.ndarray]) -> np.ndarray:
    named = np.concatenate([np.empty((0, 3), np.int64), *parts])
    return named[np.lexsort(named.T)]
