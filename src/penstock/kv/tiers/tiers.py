"""A device's block pool with lower tiers: blocks that one tier evicts are kept in the next.

Each tier is a `BlockPool`. A block that is onboarded also stays in the lower tier. When the device evicts the block again, it
only becomes the newest there, without another copy. So a lower tier is useful only if it is larger than the one above.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.core.ids import BlockId
from penstock.core.types.events import AllBlocksCleared, KvEvent, Tier
from penstock.core.wire import HashArray
from penstock.kv.pool.pool import BlockPool, Evicted


class TierBlocks(NamedTuple):
    """Blocks of one tier's pool."""

    tier: Tier
    block_ids: list[BlockId]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_ids)

    @property
    def device_ids(self) -> Sequence[BlockId]:
        """Those on the device."""
        return self.block_ids if self.tier is Tier.DEVICE else ()


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A copy of the content of `sources`, in order, to the device's blocks `targets`.

    All blocks are referenced until the fetch is over. Compared by identity.
    """

    sources: tuple[TierBlocks, ...]
    targets: list[BlockId]


class WriteBack(Protocol):
    """Copies evicted blocks to a lower tier; `TieredPool` decides which, and keeps their hashes."""

    def write_back(self, source: TierBlocks, target: TierBlocks) -> None:
        """Copy blocks down, one to one, before the caller's next writes to the source; the target may be read any time later."""
        ...


class TieredPool:
    """A device's `BlockPool` and the pools of lower tiers. Not thread-safe; one task owns it.

    It has the methods of `BlockPool`, which concern the device only.
    """

    def __init__(self, device: BlockPool, lower: Sequence[BlockPool], copier: WriteBack) -> None:
        """Combine pools.

        Args:
            device: the pool of the sequences.
            lower: nearest first, each of another tier.
            copier: copies blocks between tiers.

        Raises:
            ValueError: two pools have the same tier, or block sizes differ.
        """
        self.tiers = (device, *lower)
        """Nearest first."""
        tiers = [pool.tier for pool in self.tiers]
        if len(set(tiers)) < len(tiers) or len({pool.block_size for pool in self.tiers}) > 1:
            raise ValueError(f"tiers: must be different ones with one block size, got {tiers}")
        self.num_blocks, self.block_size = device.num_blocks, device.block_size
        self._device = device
        self._lower = tuple(lower)
        self._of = {pool.tier: pool for pool in self.tiers}
        self._copier = copier
        self._is_cleared = False
        self.match = device.match
        self.count_idle = device.count_idle
        self.acquire = device.acquire
        self.release = device.release
        self.commit = device.commit
        self.references = device.references

    @property
    def num_available(self) -> int:
        return self._device.num_available

    @property
    def num_active(self) -> int:
        return self._device.num_active

    @property
    def num_cached(self) -> int:
        return self._device.num_cached

    def allocate(self, count: int) -> list[BlockId] | None:
        """Allocate `count` device blocks and keep evicted ones in lower tiers; None if fewer are available."""
        self.make_room(count)
        return self._device.allocate(count)

    def make_room(self, count: int) -> None:
        """Evict device blocks until `count` are free, if so many are available, and keep them in lower tiers."""
        self._keep(0, self._device.make_room(count))

    def beneath(self, block_hashes: HashArray) -> list[TierBlocks]:
        """Find cached blocks that continue a prefix after the leading blocks on the device.

        Args:
            block_hashes: (n, 2) uint64, chained, from the first block that the device lacks.

        Returns:
            consecutive runs of blocks, each in the nearest tier that has its first block; after a run of a lower tier,
            the next one may be on the device again.
        """
        runs: list[TierBlocks] = []
        depth = 0
        while depth < len(block_hashes):
            for pool in self.tiers:
                found = pool.match(block_hashes[depth:])
                if found:
                    runs.append(TierBlocks(pool.tier, found))
                    depth += len(found)
                    break
            else:
                break
        return runs

    def begin(self, runs: Sequence[TierBlocks]) -> tuple[Fetch, list[BlockId]]:
        """Allocate device blocks for runs that `beneath` found, and reference the blocks to read.

        The caller makes sure that enough blocks are available, and calls `end` later.

        Returns:
            the fetch, and the device blocks for all runs in order.
        """
        for run in runs:
            self._of[run.tier].acquire(run.block_ids)
        sources = tuple(run for run in runs if run.tier is not self._device.tier)
        targets = self.allocate(sum(len(run.block_ids) for run in sources))
        assert targets is not None, "begun without room"
        block_ids: list[BlockId] = []
        start = 0
        for run in runs:
            if run.tier is self._device.tier:
                block_ids += run.block_ids
            else:
                block_ids += targets[start : start + len(run.block_ids)]
                start += len(run.block_ids)
        return Fetch(sources, targets), block_ids

    def end(self, fetch: Fetch) -> None:
        """Release the blocks that a fetch read, as the newest of their tier. The device blocks stay with their sequence."""
        for tier, block_ids in fetch.sources:
            self._of[tier].release(block_ids)

    def reset(self) -> None:
        """Clear the caches of all tiers; referenced blocks stay with their sequences, as private ones."""
        for pool in self.tiers:
            pool.reset()
            pool.take_events()
        self._is_cleared = True

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call, in order for each tier, the lowest tier first.

        So a block that moves down is reported in the lower tier before it is removed from the upper one.
        """
        cleared, self._is_cleared = self._is_cleared, False
        events: tuple[KvEvent, ...] = (AllBlocksCleared(),) if cleared else ()
        for pool in reversed(self.tiers):
            events += pool.take_events()
        return events

    def check(self) -> None:
        """Raise AssertionError if the state of a tier is inconsistent."""
        for pool in self.tiers:
            pool.check()

    def _keep(self, level: int, evicted: list[Evicted]) -> None:
        """Keep evicted chains in the lower tier of this level."""
        if level < len(self._lower):
            for gone in evicted:
                self._keep_chain(level, gone)

    def _keep_chain(self, level: int, gone: Evicted) -> None:
        pool, hashes = self._lower[level], gone.block_hashes
        held: list[BlockId | None] = [*pool.match(hashes)]
        held += [next(iter(pool.match(hashes[n : n + 1])), None) for n in range(len(held), len(hashes))]
        pool.acquire([block_id for block_id in held if block_id is not None])
        new = [n for n, block_id in enumerate(held) if block_id is None]
        # If fetches are reading all other blocks of the tier, the rest of the chain is lost.
        lost = new[pool.num_available :]
        new = new[: len(new) - len(lost)]
        self._keep(level + 1, pool.make_room(len(new)))
        taken = pool.allocate(len(new))
        assert taken is not None, "no more than are available"
        for n, block_id in zip(new, taken, strict=True):
            held[n] = block_id
        if taken:
            source = TierBlocks(self.tiers[level].tier, [gone.block_ids[n] for n in new])
            self._copier.write_back(source, TierBlocks(pool.tier, taken))
        kept = [block_id for block_id in held if block_id is not None]
        end = lost[0] if lost else len(hashes)
        leading = [block_id for block_id in held[:end] if block_id is not None]
        pool.commit(leading, hashes[:end], gone.parent)
        pool.release(kept)
