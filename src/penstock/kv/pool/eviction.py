"""Eviction policies: which cached blocks a pool without free blocks evicts. `testing.eviction` is their suite."""

from collections.abc import Collection
from itertools import islice
from typing import Protocol

from penstock.core.ids import BlockId


class EvictionPolicy(Protocol):
    def victims(self, candidates: Collection[BlockId], count: int) -> list[BlockId]:
        """Choose `count` different blocks to evict.

        Args:
            candidates: unreferenced cached blocks, at least `count`, least recently used first; of one sequence the
                tail first.
            count: number of blocks.
        """
        ...


class Lru:
    """Least recently used. Of one sequence the tail is evicted before the prefix, which other requests may share."""

    def victims(self, candidates: Collection[BlockId], count: int) -> list[BlockId]:
        return list(islice(candidates, count))
