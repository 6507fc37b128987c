"""A device's blocks with tiers beneath them: what one tier gives up, the next one keeps.

Each tier is a `BlockPool`. What is brought back up stays below as well, so that a block that is given up again only
becomes the newest there, without another copy; a lower tier is worth having where it is larger than the one above.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.core.ids import BlockId
from penstock.core.types.events import AllBlocksCleared, KvEvent, Tier
from penstock.core.wire import HashArray
from penstock.kv.pool.pool import BlockPool, GivenUp


class TierBlocks(NamedTuple):
    """Blocks of one tier's pool."""

    tier: Tier
    block_ids: list[BlockId]


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """The content of `sources`, in order, on its way into the device's blocks `targets`.

    All of them are held until the fetch is over. One fetch equals no other.
    """

    sources: tuple[TierBlocks, ...]
    targets: list[BlockId]


class WriteBack(Protocol):
    """Copies what a tier gave up; `TieredPool` says which, and keeps the names."""

    def write_back(self, source: TierBlocks, target: TierBlocks) -> None:
        """Copy blocks down, one to one. The caller writes to the source's blocks next, and reads the target's any time later."""
        ...


class TieredPool:
    """A device's `BlockPool` and those beneath it. Not thread-safe; one task owns it.

    What `BlockPool` offers is offered alike, and is about the device alone.
    """

    def __init__(self, device: BlockPool, lower: Sequence[BlockPool], copier: WriteBack) -> None:
        """Put pools on top of each other.

        Args:
            device: where sequences' blocks are.
            lower: nearest first, each of a tier of its own.
            copier: does what is decided here.

        Raises:
            ValueError: pools of the same tier, or of another block size.
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
        """Take `count` blocks of the device; what goes for them is kept beneath. None if there are not as many."""
        self._keep(0, self._device.make_room(count))
        return self._device.allocate(count)

    def beneath(self, block_hashes: HashArray) -> list[TierBlocks]:
        """Find what a prefix goes on with after all that the device has of it in one piece.

        Args:
            block_hashes: (n, 2) uint64, chained, from the first that the device has not.

        Returns:
            Runs of blocks, each in the nearest tier that holds its first one, the device among them again after a gap
            that others fill.
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
        """Take device blocks for the runs that `beneath` found, and hold what is read.

        Room for them is the caller's business, as is `end`.

        Returns:
            What to fetch, and the device's blocks for all runs in order.
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
        """Hold what was read no longer; it is the newest of its tier. The device's blocks stay with their sequence."""
        for tier, block_ids in fetch.sources:
            self._of[tier].release(block_ids)

    def reset(self) -> None:
        """Forget all cached content of all tiers; referenced blocks stay with their sequences, as private ones."""
        for pool in self.tiers:
            pool.reset()
            pool.take_events()
        self._is_cleared = True

    def take_events(self) -> tuple[KvEvent, ...]:
        """Hand over what changed since the last call, in order for each tier; lower ones first, so that nothing that moves is nowhere."""
        cleared, self._is_cleared = self._is_cleared, False
        events: tuple[KvEvent, ...] = (AllBlocksCleared(),) if cleared else ()
        for pool in reversed(self.tiers):
            events += pool.take_events()
        return events

    def check(self) -> None:
        """Raise AssertionError where the state of a tier contradicts itself."""
        for pool in self.tiers:
            pool.check()

    def _keep(self, level: int, given_up: list[GivenUp]) -> None:
        """Have the lower tier of that level keep what the one above it gave up."""
        if level < len(self._lower):
            for gone in given_up:
                self._keep_chain(level, gone)

    def _keep_chain(self, level: int, gone: GivenUp) -> None:
        pool, hashes = self._lower[level], gone.block_hashes
        held: list[BlockId | None] = [*pool.match(hashes)]
        held += [next(iter(pool.match(hashes[n : n + 1])), None) for n in range(len(held), len(hashes))]
        pool.acquire([block_id for block_id in held if block_id is not None])
        new = [n for n, block_id in enumerate(held) if block_id is None]
        # Where the tier is all being read, the rest of the chain is lost.
        lost = new[pool.num_available :]
        new = new[: len(new) - len(lost)]
        self._keep(level + 1, pool.make_room(len(new)))
        taken = pool.allocate(len(new))
        assert taken is not None, "as many as are available"
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
