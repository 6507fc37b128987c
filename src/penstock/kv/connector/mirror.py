"""Which blocks the tiers of all device processes keep, as their reports tell: the scheduler's copy, a step old at worst.

With several processes (tensor or pipeline parallelism) a block counts once each of them keeps its part.
"""

from collections.abc import Iterator, Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Holder, KvEvent, Tier
from penstock.core.wire import HashArray, hash_list, pack_hashes


class TierMirror:
    """The blocks of all tiers by the low half of their hash. One task owns it."""

    def __init__(self, num_ranks: int) -> None:
        self.shared: dict[Tier, Holder] = {}
        """Whose blocks the tiers load that other workers load from too."""
        self._num_ranks = num_ranks
        self._all = (1 << num_ranks) - 1
        self._held: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        """By tier and block, a bit for each process that keeps it."""

    def locate(self, tier: Tier, block_hashes: HashArray) -> int:
        """Count the leading blocks that a tier of every process keeps."""
        held, whole = self._held[tier], self._all
        if not held:
            return 0
        hashes: list[int] = block_hashes[:, 0].tolist()
        return next((n for n, each in enumerate(hashes) if held.get(each) != whole), len(hashes))

    def held(self, tiers: Sequence[Tier], block_hashes: HashArray) -> NDArray[np.bool_]:
        """Say of each block whether one of these tiers keeps it in every process: (n,)."""
        kept, whole = [self._held[tier] for tier in tiers], self._all
        return np.array(
            [any(held.get(each) == whole for held in kept) for each in block_hashes[:, 0].tolist()], np.bool_
        )

    def apply(self, rank: int, events: Sequence[KvEvent]) -> list[KvEvent]:
        """Note one process's events.

        Returns:
            the events of all processes together: a block is stored once all keep it, and removed once one does not. Who clears
            a shared tier forgets what others keep: that is `AllBlocksCleared` of its holder.
        """
        return [told for event in events for told in self._apply(1 << rank, event)]

    def _apply(self, bit: int, event: KvEvent) -> Iterator[KvEvent]:
        match event:
            case BlockStored():
                yield from self._store(bit, event)
            case BlockRemoved():
                yield from self._remove(bit, event.tier, hash_list(event.block_hashes))
            case AllBlocksCleared():
                for tier, held in self._held.items():
                    removed = list(
                        self._remove(bit, tier, [each for each, bits in held.items() if bits & bit])
                    )
                    if removed and tier in self.shared:
                        yield AllBlocksCleared(holder=self.shared[tier])
                    else:
                        yield from removed
            case _:
                assert_never(event)

    def _store(self, bit: int, event: BlockStored) -> Iterator[KvEvent]:
        held = self._held[event.tier]
        parent = event.parent_block_hash
        for each in hash_list(event.block_hashes):
            bits = held.get(each, 0)
            held[each] = bits | bit
            if bits != self._all == held[each]:
                yield BlockStored(
                    block_hashes=pack_hashes([each]),
                    parent_block_hash=parent,
                    block_size=event.block_size,
                    tier=event.tier,
                )
            parent = each

    def _remove(self, bit: int, tier: Tier, hashes: Sequence[int]) -> Iterator[KvEvent]:
        held = self._held[tier]
        gone = []
        for each in hashes:
            bits = held.get(each, 0)
            if bits == self._all:
                gone.append(each)
            if bits & ~bit:
                held[each] = bits & ~bit
            else:
                held.pop(each, None)
        if gone:
            yield BlockRemoved(block_hashes=pack_hashes(gone), tier=tier)
