"""Block tables of running requests in groups with a sliding window: a block is free again once it falls behind the window."""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.groups.groups import KvGroups
from penstock.kv.pool.pool import BlockPool


@dataclass(slots=True)
class _Row:
    """The blocks of one slot.

    start:   by group, the first position that has a block
    end:     the position after the last one that has a block, of all groups
    spare:   blocks for the next positions
    cached:  blocks in the table that the pool's cache has: they are not written again
    hits:    blocks in the table that it was admitted with, and that others may use too
    owed:    blocks that it gave up and could not replace at once
    to_keep: prefixes whose last window is cached once it is computed, in blocks, ascending
    kept:    prefixes whose last window was cached
    is_loading: whether the blocks that it was admitted with have no content yet
    """

    start: list[int]
    end: int
    spare: list[BlockId]
    cached: set[BlockId]
    hits: set[BlockId]
    owed: int = 0
    to_keep: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    is_loading: bool = False


class WindowTables:
    """The tables of all groups with a window, by slot and position in the prompt. Not thread-safe; one task owns it.

    A slot gets all blocks that its windows need when it is admitted; blocks move between its table and its spare ones. What
    the cache has is given back to the pool for another block when it falls behind, so that later requests find it.

    A slot always has the last window of its full blocks, so the prefix that it has computed can be cached at any time.
    """

    def __init__(self, pool: BlockPool, groups: KvGroups, slots: int, max_blocks: int) -> None:
        """Make empty tables.

        Args:
            pool: blocks of all groups.
            groups: the first one over the whole context, all others with a window.
            slots: requests that run at the same time.
            max_blocks: positions of a request.
        """
        self.block_ids: NDArray[np.int32] = np.zeros((len(groups.others), slots, max_blocks), np.int32)
        """(groups, slots, positions) int32; 0 where there is no block."""
        self._pool = pool
        self._groups = groups
        self._rows: dict[int, _Row] = {}

    def admit(
        self, slot: int, spare: list[BlockId], held: Sequence[Sequence[BlockId]], end: int, *, are_hits: bool
    ) -> None:
        """Give a slot its first blocks, for each of which the caller has taken a reference.

        Args:
            slot: without blocks.
            spare: for positions from `end` on.
            held: by group, blocks of the last window of the prefix that it need not compute.
            end: length of this prefix, in blocks.
            are_hits: whether these blocks are in the cache; if not, they are about to be loaded.
        """
        hits = {block_id for block_ids in held for block_id in block_ids} if are_hits else set()
        start = [end - len(block_ids) for block_ids in held]
        row = self._rows[slot] = _Row(start, end, spare, set(hits), hits, is_loading=not are_hits)
        for group, block_ids in enumerate(held):
            self.block_ids[group, slot, row.start[group] : end] = block_ids
        if not are_hits:
            self.keep_at(slot, end)

    def keep_at(self, slot: int, end: int) -> None:
        """Cache the last window of a slot's first `end` blocks once they are computed; not of a prefix that it did not compute."""
        row = self._rows[slot]
        if end > 0 and end not in row.to_keep and self._has_window(row, end):
            insort(row.to_keep, end)

    def reach(self, slot: int, end: int) -> bool:
        """Give a slot blocks for positions up to `end` in every group; False if the pool has too few, and nothing is lost."""
        row = self._rows[slot]
        needed = (end - row.end) * len(row.start)
        if needed <= 0:
            return True
        if needed > len(row.spare):
            more = self._pool.allocate(needed - len(row.spare))
            if more is None:
                return False
            row.owed = max(row.owed - len(more), 0)
            row.spare += more
        taken = np.array([row.spare.pop() for _ in range(needed)], np.int32)
        self.block_ids[:, slot, row.end : end] = taken.reshape(len(row.start), -1)
        row.end = end
        return True

    def advance(self, slot: int, num_full: int, block_hashes: HashArray) -> None:
        """Cache the windows that are to be kept, and free the blocks that fall behind the last window.

        Args:
            slot: the slot.
            num_full: full blocks that it has computed.
            block_hashes: (at least num_full, 2) uint64.
        """
        row = self._rows[slot]
        row.is_loading = False
        while row.to_keep and row.to_keep[0] <= num_full:
            self._keep(slot, row, row.to_keep.pop(0), block_hashes)
        for group, place in enumerate(self._groups.others):
            self._free(slot, row, group, place.start(num_full))

    def keep(self, slot: int, num_full: int, block_hashes: HashArray) -> None:
        """Cache the last window of a slot's full blocks, as before the slot is left; arguments are those of `advance`."""
        row = self._rows[slot]
        if num_full and num_full not in row.kept and not row.is_loading:
            self._keep(slot, row, num_full, block_hashes)

    def kept(self, slot: int, block_hashes: HashArray) -> Iterator[tuple[int, HashArray]]:
        """Give the windows that a slot has cached: by position, the names of its blocks there.

        Returns:
            (position, (m, 2) uint64): the first name is that of the prompt's block, each block is the child of the one before.
        """
        positions: dict[int, int] = {}
        for end in self._rows[slot].kept:
            for number, place in enumerate(self._groups.others, 1):
                for position in range(place.start(end), end):
                    positions[position] = max(positions.get(position, 0), number)
        for position in sorted(positions):
            places = self._groups.others[: positions[position]]
            yield position, self._groups.chain(block_hashes[position : position + 1], places)

    def trim(self, slot: int, num_blocks: int) -> list[BlockId]:
        """Take the spare blocks of a slot that has more than `num_blocks`; the caller releases them."""
        row = self._rows[slot]
        excess = self.num_blocks(slot) + len(row.spare) + row.owed - num_blocks
        waived = min(max(excess, 0), row.owed)
        row.owed -= waived
        count = min(max(excess - waived, 0), len(row.spare))
        freed, row.spare = row.spare[:count], row.spare[count:]
        return freed

    def leave(self, slot: int) -> list[BlockId]:
        """Take all blocks of a slot, in the order of their positions; the caller releases them."""
        row = self._rows.pop(slot)
        block_ids = [
            BlockId(int(self.block_ids[group, slot, position]))
            for position in range(min(row.start), row.end)
            for group, start in enumerate(row.start)
            if position >= start
        ]
        self.block_ids[:, slot, : row.end] = 0
        return block_ids + row.spare

    def num_blocks(self, slot: int) -> int:
        """Count the blocks in a slot's table, of all groups."""
        row = self._rows[slot]
        return sum(row.end - start for start in row.start)

    def num_owed(self, slot: int) -> int:
        """Count the blocks that a slot may still need of the pool: for those that it shares, and those that it could not replace."""
        row = self._rows[slot]
        return len(row.hits) + row.owed

    def holders(self) -> Counter[BlockId]:
        """Count its references to each block."""
        held: Counter[BlockId] = Counter()
        for slot, row in self._rows.items():
            held.update(row.spare)
            for group, start in enumerate(row.start):
                held.update(self.block_ids[group, slot, start : row.end].tolist())
        return held

    def check(self, slot: int, num_full: int, num_blocks: int) -> None:
        """Raise AssertionError if a slot lacks a block of its window, or has one behind it.

        Args:
            slot: the slot.
            num_full: full blocks that it has computed.
            num_blocks: positions that have a block in the first group.
        """
        row = self._rows[slot]
        if row.is_loading:
            return
        assert row.end == num_blocks, (
            f"slot {slot}: blocks up to {row.end}, the first group up to {num_blocks}"
        )
        for group, place in enumerate(self._groups.others):
            first = place.start(num_full)
            assert row.start[group] == first, (
                f"slot {slot}: blocks from {row.start[group]} on, expected {first}"
            )
            assert not self.block_ids[group, slot, :first].any(), f"slot {slot}: a block behind the window"

    def _has_window(self, row: _Row, end: int) -> bool:
        return all(
            place.start(end) >= start for place, start in zip(self._groups.others, row.start, strict=True)
        )

    def _keep(self, slot: int, row: _Row, end: int, block_hashes: HashArray) -> None:
        assert self._has_window(row, end), (
            f"slot {slot}: blocks from {row.start} on, and a window ends at {end}"
        )
        starts = [place.start(end) for place in self._groups.others]
        for position in range(min(starts), end):
            places = [
                place for place, start in zip(self._groups.others, starts, strict=True) if start <= position
            ]
            names = self._groups.chain(block_hashes[position : position + 1], places)[1:]
            block_ids: list[BlockId] = self.block_ids[: len(places), slot, position].tolist()
            self._pool.commit(block_ids, names, int(block_hashes[position, 0]))
            row.cached.update(block_ids)
        row.kept.append(end)

    def _free(self, slot: int, row: _Row, group: int, first: int) -> None:
        """Free a group's blocks before position `first`."""
        start = row.start[group]
        if first <= start:
            return
        gone: list[BlockId] = self.block_ids[group, slot, start:first].tolist()
        self.block_ids[group, slot, start:first] = 0
        row.start[group] = first
        cached = [block_id for block_id in gone if block_id in row.cached]
        row.spare += [block_id for block_id in gone if block_id not in row.cached]
        if not cached:
            return
        row.cached.difference_update(cached)
        row.hits.difference_update(cached)
        self._pool.release(cached)
        new = self._pool.allocate(len(cached))
        if new is None:
            row.owed += len(cached)
        else:
            row.spare += new
