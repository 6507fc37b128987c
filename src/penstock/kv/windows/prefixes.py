"""Which prefixes a pool holds in all groups of layers."""

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.groups.groups import KvGroups, Place
from penstock.kv.pool.pool import BlockPool
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
