"""The prefixes that a region advertises to another: hashes at the ends of chunks, as numbered changes."""

import struct
from functools import cache

import numpy as np
from numpy.typing import NDArray

from penstock.core.wire import HashArray, PackedHashes, Wire

CHUNK_TOKENS = 256
"""Of the first chunks of a prompt. A chunk is named by the hash of its last block, and so stands for the whole prefix that ends
there. Computing less than a chunk takes less time than the way to another region."""
_BLOCKS_MAX = 1 << 17
_PER_OCTAVE = 4


def blocks_per_chunk(block_size: int) -> int:
    """Give the blocks of a chunk: those of `CHUNK_TOKENS`, or one where a block is larger."""
    return max(1, CHUNK_TOKENS // block_size)


def chunk_hashes(hashes: HashArray, block_size: int) -> HashArray:
    """Give the hashes of a prompt's full chunks; `hashes` is (n,) uint64, of its full blocks from the root on."""
    ends = chunk_ends(block_size)
    return hashes[ends[: np.searchsorted(ends, len(hashes), side="right")] - 1]


@cache
def chunk_ends(block_size: int) -> NDArray[np.intp]:
    """(n,) blocks before the end of each chunk: ends lie a chunk apart, and beyond eight chunks a quarter to an eighth of the way so far.

    So a prefix of 100,000 tokens has 30 chunks instead of 390, and what is known of it falls short of what is held by a fifth at most.
    """
    ends, step = [], 1
    last = 0
    while last < _BLOCKS_MAX // blocks_per_chunk(block_size):
        if last >= 2 * _PER_OCTAVE * step:
            step *= 2
        last += step
        ends.append(last)
    return np.array(ends, dtype=np.intp) * blocks_per_chunk(block_size)


def pack_root(root: tuple[int, int]) -> bytes:
    """Pack the parent of every first block hash: two prefixes can be compared where theirs are equal."""
    return struct.pack("<QQ", *root)


class PrefixSummary(Wire, frozen=True):
    """Changes of the chunks that one router of a region advertises.

    Attributes:
        origin: the router's process, drawn at its start.
        root: parent of every first block hash, 16 bytes: equal where hash key, hash version, block size and model are.
        chunk_tokens: tokens of the first chunk.
        since: the changes after this version of `origin`; 0: all chunks, which replace earlier ones.
        version: of the last change in this message; more may follow.
        added: chunks that are held now.
        removed: chunks that are held no longer.
    """

    origin: int
    root: bytes
    chunk_tokens: int
    since: int
    version: int
    added: PackedHashes = PackedHashes(b"")
    removed: PackedHashes = PackedHashes(b"")
