"""What a region tells another of the prefixes that it holds: hashes of chunks of 256 tokens, as numbered changes."""

import struct

from penstock.core.wire import HashArray, PackedHashes, Wire

CHUNK_TOKENS = 256
"""A chunk is named by the hash of its last block, and so stands for the whole prefix that ends there. Computing less than a chunk
takes less time than the way to another region."""


def blocks_per_chunk(block_size: int) -> int:
    """Give the blocks of a chunk: those of `CHUNK_TOKENS`, or one where a block is larger."""
    return max(1, CHUNK_TOKENS // block_size)


def chunk_hashes(hashes: HashArray, block_size: int) -> HashArray:
    """Give the hashes of a prompt's full chunks; `hashes` is (n,) uint64, of its full blocks from the root on."""
    blocks = blocks_per_chunk(block_size)
    return hashes[blocks - 1 :: blocks]


def pack_root(root: tuple[int, int]) -> bytes:
    """Pack the parent of every first block hash: two prefixes can be compared where theirs are equal."""
    return struct.pack("<QQ", *root)


class PrefixSummary(Wire, frozen=True):
    """Changes of what one router of a region tells of the chunks that workers there hold.

    Attributes:
        origin: the router's process, drawn at its start.
        root: parent of every first block hash, 16 bytes: equal where hash key, hash version, block size and model are.
        chunk_tokens: tokens of a chunk.
        since: the changes after this version of `origin`; 0: all, and what was told before holds no longer.
        version: the last change that is told here; more may follow it.
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
