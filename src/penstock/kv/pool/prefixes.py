"""A tier's index over a `BlockPool`: finds the blocks of a prefix, and publishes new ones."""

from collections.abc import Collection, Sequence

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.pool.pool import BlockPool


def block_keys(hashes: HashArray) -> list[bytes]:
    """Return each hash as 16 bytes."""
    keys: list[bytes] = np.ascontiguousarray(hashes, dtype="<u8").view("V16").ravel().tolist()
    return keys


def split_prefix(
    pool: BlockPool, hashes: HashArray, coming: Collection[bytes] = ()
) -> tuple[list[BlockId], list[int]]:
    """Split a prefix into the blocks that a pool keeps, and the indexes of the missing ones.

    Args:
        pool: the tier's.
        hashes: (n, 2) uint64, of a prefix from its first block on.
        coming: `block_keys` of blocks that are being copied to the tier, which count as neither.
    """
    keys = block_keys(hashes) if coming else ()
    held: list[BlockId] = []
    missing: list[int] = []
    index = 0
    while index < len(hashes):
        found = pool.match(hashes[index:])
        held += found
        index += len(found)
        if index < len(hashes):
            if not coming or keys[index] not in coming:
                missing.append(index)
            index += 1
    return held, missing


def commit_runs(
    pool: BlockPool, hashes: HashArray, indexes: Sequence[int], block_ids: Sequence[BlockId]
) -> None:
    """Publish blocks of a prefix; each run of neighbours becomes one event.

    Args:
        pool: the tier's.
        hashes: (n, 2) uint64, of a prefix from its first block on.
        indexes: (m,) ascending, of the blocks in the prefix.
        block_ids: (m,) the pool's blocks, referenced.
    """
    start = 0
    for end in range(1, len(indexes) + 1):
        if end == len(indexes) or indexes[end] != indexes[end - 1] + 1:
            first, last = indexes[start], indexes[end - 1]
            parent = int(hashes[first - 1, 0]) if first else None
            pool.commit(block_ids[start:end], hashes[first : last + 1], parent)
            start = end
