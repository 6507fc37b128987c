"""Write-back: finds the prefixes to copy before the device evicts them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from penstock.core.wire import HashArray, hash_list
from penstock.kv.pool.pool import BlockPool

_AHEAD_SHARE = 4
"""Copies are made ahead for one in so many device blocks: as long as more are free, nothing is copied."""
_AHEAD_MAX = 4096
_LOOKS = 4
"""Looks while so many blocks as are copied ahead come and go."""


class UpcomingPrefixes:
    """The prefixes of one device whose last blocks are evicted next, for the tiers that lack them. One task owns it.

    A prefix is copied from its first block on, since a tier's blocks are of use after those before them.
    """

    def __init__(self, pool: BlockPool, num_tiers: int) -> None:
        """Begin without blocks.

        Args:
            pool: the device's blocks.
            num_tiers: tiers that are written back to.
        """
        self._pool = pool
        self._ahead = min(max(pool.num_blocks // _AHEAD_SHARE, 1), _AHEAD_MAX)
        self._known: dict[int, tuple[int, int | None]] = {}
        """Cached blocks of requests that left: by low64, its high64 and its parent's low64."""
        self._lacking: list[set[int]] = [set() for _ in range(num_tiers)]
        """By tier, low64 of blocks that were not handed out by `take`."""
        self._changed = 0

    def add(self, block_hashes: HashArray, tier: int, start: int) -> None:
        """Note blocks that a request left, and that a tier is to have before they are evicted.

        Args:
            block_hashes: (n, 2) uint64, from the prefix's first block on.
            tier: index of the tier.
            start: leading blocks that the tier has.
        """
        cached = len(self._pool.match(block_hashes))
        parent: int | None = None
        for low, high in block_hashes[:cached].tolist():
            self._known[low] = high, parent
            parent = low
        self._lacking[tier].update(block_hashes[start:cached, 0].tolist())
        self._changed = self._ahead

    def hang(self, names: HashArray, tier: int) -> None:
        """Note blocks of windows at the position of a block that `add` was told of, the first of `names`: each the child of the one before."""
        cached = len(self._pool.match(names))
        lows = names[:cached].tolist()
        for (parent, _), (low, high) in pairwise(lows):
            self._known[low] = high, parent
            self._lacking[tier].add(low)

    def note(self, events: Sequence[KvEvent]) -> Iterator[tuple[int, HashArray]]:
        """Take in the device's events; yields blocks that it evicted before they were handed out, as (tier, (1, 2) hash)."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
            elif isinstance(event, BlockStored):
                self._changed += len(hash_list(event.block_hashes))
            elif isinstance(event, BlockRemoved):
                lows = hash_list(event.block_hashes)
                self._changed += len(lows)
                for low in lows:
                    high, _ = self._known.pop(low, (0, None))
                    for tier, lacking in enumerate(self._lacking):
                        if low in lacking:
                            lacking.remove(low)
                            yield tier, np.array([[low, high]], np.uint64)

    def take(self) -> Iterator[tuple[int, HashArray]]:
        """Hand out the prefixes whose copies should begin, as (tier, hashes from the first block on); each block once.

        Looks only after a part of the device has changed since the last look.
        """
        if self._changed * _LOOKS < self._ahead or not any(self._lacking):
            return
        self._changed = 0
        for chain in self._pool.upcoming(self._ahead):
            lows = chain.block_hashes[:, 0].tolist()
            for tier, lacking in enumerate(self._lacking):
                last = next((low for low in reversed(lows) if low in lacking), None)
                if last is not None:
                    prefix = self._prefix(last)
                    lacking.difference_update(prefix[:, 0].tolist())
                    yield tier, prefix

    def clear(self) -> None:
        """Forget all blocks."""
        self._known.clear()
        for lacking in self._lacking:
            lacking.clear()

    def _prefix(self, last: int) -> HashArray:
        """Give the hashes of a known block and of all before it."""
        rows: list[tuple[int, int]] = []
        low: int | None = last
        while low is not None and low in self._known:
            high, parent = self._known[low]
            rows.append((low, high))
            low = parent
        return np.array(rows[::-1], np.uint64)
