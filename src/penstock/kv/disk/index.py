"""The index of a slot file in memory: a block pool in which a slot is a block, and a copy of all records."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.use import BlockUse, EvictionPolicy
from penstock.transfer.storage.slots import RECORD, Records

_NEWEST = 64
_USE = BlockUse()


class SlotIndex:
    """Which block each slot has, and which blocks were used last. Not thread-safe; one task owns it.

    Attributes:
        pool: its blocks are the slots; each reader or writer of a slot holds a reference.
        newest: (n, 2) uint64, a few blocks that were written last, or used last before the file was opened.
    """

    def __init__(self, records: Records, block_size: int, eviction: EvictionPolicy) -> None:
        """Fill the pool with the trusted blocks, in the order of their last use.

        Args:
            records: (num_slots,) of all slots, zeros for a free one; the index owns the array from now on.
            block_size: tokens in a block.
            eviction: as in `BlockPool`.
        """
        self.pool = BlockPool(len(records), block_size, eviction, Tier.DISK)
        self._records = records
        self._touched: set[BlockId] = set()
        trusted = records["slot"] > 0
        order = np.flatnonzero(trusted)
        order = order[np.argsort(records["generation"][order], kind="stable")[::-1]]
        self._generation = int(records["generation"][order[0]]) if len(order) else 0
        self.pool.allocate(len(records))
        rows = records[order]
        hashes, parents = np.ascontiguousarray(rows["hash"]), rows["parent"]
        self.newest: HashArray = hashes[:_NEWEST]
        slots = [BlockId(slot) for slot in order.tolist()]
        begins = np.concatenate([[True], parents[1:] != hashes[:-1, 0]])[: len(slots)]
        for start, end in pairwise([*np.flatnonzero(begins).tolist(), len(slots)]):
            self.pool.commit(slots[start:end], hashes[start:end], int(parents[start]) or None)
        self.pool.release([BlockId(slot) for slot in np.flatnonzero(~trusted).tolist()])
        self.release_used(slots)

    @property
    def num_touched(self) -> int:
        """Slots that `take_touched` would return at most."""
        return len(self._touched)

    def find(self, hashes: HashArray) -> list[BlockId | None]:
        """Find the slot of each of (n, 2) hashes."""
        return [next(iter(self.pool.match(hashes[n : n + 1])), None) for n in range(len(hashes))]

    def data_sums(self, slots: list[BlockId]) -> list[int]:
        """Give the checksums that the slots' data must have."""
        sums: list[int] = self._records["data_sum"][slots].tolist()
        return sums

    def draft(self, slots: list[BlockId], hashes: HashArray, parents: NDArray[np.uint64]) -> Records:
        """Make the (n,) records of new blocks of one sequence, without length, namespace and checksums."""
        rows = np.zeros(len(slots), RECORD)
        rows["hash"], rows["parent"] = hashes, parents
        rows["slot"] = np.array(slots, np.intp) + 1
        rows["generation"] = self._next_generations(len(slots))
        return rows

    def publish(self, slots: list[BlockId], rows: Records, published: NDArray[np.bool_]) -> None:
        """Store the records of slots that the caller holds; blocks with `published` are in the cache from now on."""
        self._records[slots] = rows
        self._records[np.array(slots, np.intp)[~published]] = 0
        hashes, parents = np.ascontiguousarray(rows["hash"]), rows["parent"]
        if published.any():
            self.newest = hashes[published][:_NEWEST]
        follows = published & np.roll(published, 1) & (parents == np.roll(hashes[:, 0], 1))
        follows[:1] = False
        starts = np.flatnonzero(published & ~follows).tolist()
        ends = np.flatnonzero(published & ~np.append(follows[1:], False)).tolist()
        for start, last in zip(starts, ends, strict=True):
            run = slice(start, last + 1)
            self.pool.commit(slots[run], hashes[run], int(parents[start]) or None)

    def drop(self, slots: list[BlockId]) -> None:
        """Forget damaged blocks, which the caller holds."""
        self.pool.forget(slots)
        self._records[slots] = 0
        self._touched.difference_update(slots)

    def touch(self, slots: list[BlockId]) -> None:
        """Note that blocks of one sequence were used."""
        slots = [slot for slot in slots if self._records["slot"][slot]]
        self._records["generation"][slots] = self._next_generations(len(slots))
        self._touched.update(slots)

    def release_used(self, slots: list[BlockId]) -> None:
        """Release blocks that were stored or loaded."""
        self.pool.release(slots, _USE)

    def take_touched(self) -> tuple[list[BlockId], Records]:
        """Reference the slots used since the last call; return them with the (n,) records to write."""
        slots = [slot for slot in sorted(self._touched) if self.pool.match(self._hash(slot)) == [slot]]
        self._touched.clear()
        self.pool.acquire(slots)
        rows: Records = self._records[slots]
        return slots, rows

    def check(self) -> None:
        """Raise AssertionError if pool and records differ; nobody may hold a slot."""
        self.pool.check()
        assert not self.pool.references(), "somebody holds a slot"
        held = self._records[self._records["slot"] > 0]["hash"]
        resident = {row.tobytes() for row in self.pool.resident_hashes()}
        assert {row.tobytes() for row in held} >= resident, "a block without a record"

    def _hash(self, slot: int) -> HashArray:
        found: HashArray = self._records["hash"][slot : slot + 1]
        return found

    def _next_generations(self, count: int) -> NDArray[np.uint64]:
        """Number blocks of one sequence: the first one is the newest, as in the pool."""
        self._generation += count
        return np.arange(self._generation, self._generation - count, -1, dtype=np.uint64)
