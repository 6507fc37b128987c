"""A tier's index over a `BlockPool`: finds the blocks of a prefix, and publishes new ones."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.pool.pool import BlockPool
from penstock.transfer.storage.slots import Records


def block_keys(hashes: HashArray) -> list[bytes]:
    """Return each hash as 16 bytes."""
    keys: list[bytes] = np.ascontiguousarray(hashes, dtype="<u8").view("V16").ravel().tolist()
    return keys


def split_prefix(pool: BlockPool, hashes: HashArray) -> tuple[list[BlockId], list[int]]:
    """Split a prefix into the blocks that a pool keeps, and the indexes of the missing ones.

    Args:
        pool: the tier's.
        hashes: (n, 2) uint64, of a prefix from its first block on.
    """
    held: list[BlockId] = []
    missing: list[int] = []
    index = 0
    while index < len(hashes):
        found = pool.match(hashes[index:])
        held += found
        index += len(found)
        if index < len(hashes):
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


def commit_chains(pool: BlockPool, slots: NDArray[np.intp], records: Records) -> None:
    """Publish blocks in the order in which they were stored, each chain of them as one event.

    Args:
        pool: the tier's.
        slots: (n,) the pool's blocks, referenced.
        records: (n,) of them.
    """
    order = np.argsort(records["generation"], kind="stable")
    numbers = [BlockId(slot) for slot in slots[order].tolist()]
    hashes, parents = np.ascontiguousarray(records["hash"][order]), records["parent"][order]
    begins = np.concatenate([[True], parents[1:] != hashes[:-1, 0]])[: len(numbers)]
    for start, end in pairwise([*np.flatnonzero(begins).tolist(), len(numbers)]):
        pool.commit(numbers[start:end], hashes[start:end], int(parents[start]) or None)
