"""Which cached block goes when a pool is out of free ones. A policy is one method; `testing.eviction` is its suite."""

from collections.abc import Collection
from itertools import islice
from typing import Protocol

from penstock.core.ids import BlockId


class EvictionPolicy(Protocol):
    def victims(self, candidates: Collection[BlockId], count: int) -> list[BlockId]:
        """Choose `count` different blocks to give up.

        Args:
            candidates: cached blocks that nobody references, at least `count`, longest unused first; of one
                sequence its tail first.
            count: how many.
        """
        ...


class Lru:
    """Least recently used; of one sequence the tail goes before the prefix that others may share."""

    def victims(self, candidates: Collection[BlockId], count: int) -> list[BlockId]:
        return list(islice(candidates, count))
