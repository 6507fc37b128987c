"""Merges the KV events of an engine's data-parallel ranks, each with its own cache, into one worker's events."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import assert_never

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.wire import hash_list, pack_hashes


class RankedBlocks:
    """The blocks of each rank, from its events. Not thread-safe.

    The worker holds a block while any rank holds it. When one rank clears its cache, the blocks of others stay.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._held: list[dict[Tier, Counter[int]]] = [
            {tier: Counter() for tier in Tier} for _ in range(num_ranks)
        ]

    def merge(self, rank: int, events: Sequence[KvEvent]) -> Sequence[KvEvent]:
        """Apply one rank's events and return those of the worker. With a single rank, events are returned as they are."""
        if self.num_ranks == 1:
            return events
        return [each for event in events for each in self._merged(rank, event)]

    def depth(self, rank: int, block_hashes: Sequence[int]) -> int:
        """Count the leading blocks of a prompt that a rank holds in any tier."""
        held = tuple(self._held[rank].values())
        return next(
            (depth for depth, name in enumerate(block_hashes) if not any(name in tier for tier in held)),
            len(block_hashes),
        )

    def _merged(self, rank: int, event: KvEvent) -> Iterator[KvEvent]:
        held = self._held[rank]
        match event:
            case BlockStored():
                held[event.tier].update(hash_list(event.block_hashes))
                yield event
            case BlockRemoved():
                copies = held[event.tier]
                for name in hash_list(event.block_hashes):
                    copies[name] -= 1
                    if copies[name] <= 0:
                        del copies[name]
                yield event
            case AllBlocksCleared():
                for tier, copies in held.items():
                    if copies:
                        yield BlockRemoved(block_hashes=pack_hashes(copies.elements()), tier=tier)
                        copies.clear()
            case _:
                assert_never(event)
