"""Block tables of models with sliding windows: each group of layers has a table, and a request holds the blocks of its last window."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.groups import KvGroups, Place
from penstock.kv.pool import BlockPool, Pins
from penstock.seams.kv import KvNames


def _nowhere(_name: HashArray) -> bool:
    return False


class WindowPrefixes:
    """Finds the windows of cached prefixes by the names of their blocks. Changes nothing."""

    def __init__(self, pool: BlockPool, groups: KvGroups) -> None:
        """Look in a pool.

        Args:
            pool: blocks of all groups.
            groups: the first one over the whole context, all others with a window.
        """
        self._pool = pool
        self._groups = groups

    def longest(
        self, block_hashes: HashArray, num_leading: int, lower: Callable[[HashArray], bool] = _nowhere
    ) -> int:
        """Return the length of the longest prefix whose last window is held in every group, in blocks.

        Args:
            block_hashes: (n, 2) uint64, of the prompt's blocks.
            num_leading: blocks that are held of the first group, from the first one on.
            lower: says whether a tier below the pool has the block with a (1, 2) name.
        """
        end = num_leading
        while end:
            lacking = max(
                self._last_lacking(place, block_hashes, end, lower) for place in self._groups.others
            )
            if lacking < 0:
                break
            end = lacking  # every longer prefix needs the block at this position
        return end

    def window(self, place: Place, block_hashes: HashArray, end: int) -> list[BlockId]:
        """Return a group's blocks of the last window of a prefix, as far as the pool has them from its first block on."""
        return self._pool.match(place.names(block_hashes[place.start(end) : end]))

    def windows(self, block_hashes: HashArray, end: int) -> list[list[BlockId]]:
        """Return the blocks of the last window of a prefix that is held, by group."""
        return [self.window(place, block_hashes, end) for place in self._groups.others]

    def names(self, block_hashes: HashArray, end: int, num_before: int) -> HashArray:
        """Name what a prefix of `end` blocks needs beside the first group's `num_before` leading blocks: (m, 2) uint64.

        The first group's blocks come first, then the last window of each other group.
        """
        windows = (place.names(block_hashes[place.start(end) : end]) for place in self._groups.others)
        return np.concatenate([block_hashes[num_before:end], *windows])

    def moved(self, block_hashes: HashArray) -> KvNames:
        """Name what a transfer of a prefix moves: its blocks, then by position those of the last window of each other group.

        The blocks of one position hang on each other, the first one on the first group's.
        """
        end, others = len(block_hashes), self._groups.others
        starts = [place.start(end) for place in others]
        hashes, parents = [block_hashes], [np.zeros(0, np.uint64)]
        for position in range(min(starts, default=end), end):
            places = [place for place, start in zip(others, starts, strict=True) if start <= position]
            chain = self._groups.chain(block_hashes[position : position + 1], places)
            hashes.append(chain[1:])
            parents.append(chain[:-1, 0])
        return KvNames(np.concatenate(hashes), np.concatenate(parents), end)

    def by_group(self, block_ids: Sequence[BlockId], end: int) -> list[list[BlockId]]:
        """Divide the last blocks of what `names` has named among the groups: the inverse of its order."""
        counts = [end - place.start(end) for place in self._groups.others]
        first = len(block_ids) - sum(counts)
        divided = []
        for count in counts:
            divided.append(list(block_ids[first : first + count]))
            first += count
        return divided

    def _last_lacking(
        self, place: Place, block_hashes: HashArray, end: int, lower: Callable[[HashArray], bool]
    ) -> int:
        """Return the last position of a window whose block is nowhere; -1 without one."""
        start = place.start(end)
        names = place.names(block_hashes[start:end])
        at = end - start
        while at:
            # the pool finds names one by one: the order is only that of the search
            at -= len(self._pool.match(np.ascontiguousarray(names[:at][::-1])))
            if at and not lower(names[at - 1 : at]):
                return start + at - 1
            at = max(at - 1, 0)
        return -1


class WindowPins(Pins):
    """Pins blocks of the first group, and with the last block of the longest usable prefix the windows that end there.

    The windows are unpinned with that block. Callers see the first group's blocks alone.
    """

    def __init__(self, pool: BlockPool, prefixes: WindowPrefixes, on_change: Callable[[], None]) -> None:
        """Make an empty set; `prefixes` are those of the pool."""
        super().__init__(pool, on_change)
        self._prefixes = prefixes
        self._windows: dict[BlockId, list[list[BlockId]]] = {}
        """By a prefix's last block: the windows that are pinned with it, once for each pin of the prefix."""

    def pin(self, block_hashes: HashArray) -> list[BlockId]:
        """Pin the longest resident prefix, and the windows of the longest one that a request could use."""
        block_ids = super().pin(block_hashes)
        end = self._prefixes.longest(block_hashes, len(block_ids))
        if end:
            windows = [each for held in self._prefixes.windows(block_hashes, end) for each in held]
            self.hold(windows)
            self._windows.setdefault(block_ids[end - 1], []).append(windows)
        return block_ids

    def pin_named(self, names: HashArray) -> list[BlockId]:
        """Pin the leading blocks of `names` that are resident, those of windows as named."""
        return super().pin(names)

    def pass_on(self, block_ids: Sequence[BlockId]) -> None:
        """Drop pins but keep the references; windows are unpinned."""
        super().pass_on(block_ids)
        self._end_windows(block_ids)

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Unpin blocks, and the windows that were pinned with them."""
        super().unpin(block_ids)
        self._end_windows(block_ids)

    def _end_windows(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            pinned = self._windows.get(block_id)
            while pinned and len(pinned) > self._held.get(block_id, 0):
                super().unpin(pinned.pop())
            if pinned is not None and not pinned:
                del self._windows[block_id]


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
