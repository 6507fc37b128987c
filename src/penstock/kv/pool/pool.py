"""The blocks of one tier: who holds them, and which prefix each one caches.

A block is in one of three states: free, referenced by at least one sequence, or idle (cached and referenced by
nobody, to be evicted when free ones run out). The states are kept by a native class or by its twin in Python.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.native import native
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.wire import HashArray, PackedHashes
from penstock.kv.pool.eviction import EvictionPolicy, Lru
from penstock.kv.pool.reference import Change, ChangeKind, ReferencePool

if TYPE_CHECKING:
    from penstock._native import Pool


_STORED, _REMOVED = int(ChangeKind.STORED), int(ChangeKind.REMOVED)  # an enum's members compare in Python


class GivenUp(NamedTuple):
    """Blocks that went to make room, each the parent of the next. Their content is in place until they are written to.

    block_hashes: (n, 2) uint64
    parent:       low64 of the block before the first, None at the root
    """

    block_ids: list[BlockId]
    block_hashes: HashArray
    parent: int | None


class BlockPool:
    """Reference-counted blocks with a prefix cache keyed by 128-bit hash.

    Blocks of equal content may exist more than once: the first one committed is the cached one, the others
    stay private to their sequence and are freed with it. An event tells of a hash, so it is told once.
    A block can outlive its parent in the cache (a sequence may hold a private duplicate of the parent);
    `match` then stops before it until the parent is committed again.
    Not thread-safe; one task owns it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        eviction: EvictionPolicy | None = None,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """Start with all blocks free.

        Args:
            num_blocks: how many there are; ids are 0 to `num_blocks` - 1.
            block_size: tokens in a block.
            eviction: None is `Lru`, which is native; a policy of your own has the whole pool run in Python,
                about seven times slower.
            tier: where the blocks are, for events.

        Raises:
            ValueError: num_blocks or block_size < 1.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size: must be >= 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tier = tier
        self._states = _make_states(num_blocks, eviction if eviction is not None else Lru())

    @property
    def tiers(self) -> "tuple[BlockPool, ...]":
        """This pool; it stands alone."""
        return (self,)

    @property
    def native(self) -> "Pool | None":
        """What keeps the blocks' states, for native code that works on them too; None where that is the twin."""
        return None if isinstance(self._states, ReferencePool) else self._states

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` can give: free ones and idle ones."""
        return self._states.num_available

    @property
    def num_active(self) -> int:
        """How many blocks sequences hold."""
        return self._states.num_active

    @property
    def num_cached(self) -> int:
        """How many hashes are resident."""
        return self._states.num_cached

    def match(self, block_hashes: HashArray) -> list[BlockId]:
        """Find the resident blocks of the longest cached prefix; they are not referenced yet.

        Args:
            block_hashes: (n, 2) uint64, chained.
        """
        return self._states.match(block_hashes)

    def count_idle(self, block_ids: Sequence[BlockId]) -> int:
        """Count those of `block_ids` whose `acquire` lowers `num_available`."""
        return self._states.count_idle(block_ids)

    def acquire(self, block_ids: Sequence[BlockId]) -> None:
        """Reference blocks that `match` found, once more each."""
        self._states.acquire(block_ids)

    def make_room(self, count: int) -> list[GivenUp]:
        """Have at least `count` free blocks, if as many are available.

        Returns:
            What went for it, the chain unused for longest first; `allocate` alone would not tell.
        """
        return [
            GivenUp(block_ids, np.frombuffer(hashes, dtype="<u8").reshape(-1, 2), parent)
            for block_ids, hashes, parent in self._states.make_room(count)
        ]

    def allocate(self, count: int) -> list[BlockId] | None:
        """Take `count` blocks with one reference each, evicting idle ones as needed; None if there are not as many."""
        return self._states.allocate(count)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference each of a sequence's blocks, given in its order; tails become evictable first."""
        self._states.release(block_ids)

    def commit(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        """Publish referenced blocks whose content is complete; those of hashes that are resident stay private.

        Args:
            block_ids: (n,) consecutive blocks of one sequence.
            block_hashes: (n, 2) uint64, their names.
            parent: low64 of the block before the first, None at the root.

        Raises:
            ValueError: not as many hashes as blocks.
        """
        self._states.commit(block_ids, block_hashes, parent)

    def reset(self) -> None:
        """Forget all cached content; referenced blocks stay with their sequences, as private ones."""
        self._states.reset()

    def take_events(self) -> tuple[KvEvent, ...]:
        """Hand over what changed since the last call, in order."""
        return tuple([self._event(change) for change in self._states.take_changes()])

    def resident_hashes(self) -> HashArray:
        """List the (n, 2) uint64 hashes in the cache, in no order."""
        return np.frombuffer(self._states.resident_hashes(), dtype="<u8").reshape(-1, 2)

    def references(self) -> dict[BlockId, int]:
        """Count the references of every block that has any, to check them against their holders."""
        return self._states.references()

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        self._states.check()

    def _event(self, change: Change) -> KvEvent:
        kind, packed, parent = change
        if kind == _STORED:
            return BlockStored(
                block_hashes=PackedHashes(packed),
                parent_block_hash=parent,
                block_size=self.block_size,
                tier=self.tier,
            )
        if kind == _REMOVED:
            return BlockRemoved(block_hashes=PackedHashes(packed), tier=self.tier)
        return AllBlocksCleared()


def _make_states(num_blocks: int, eviction: EvictionPolicy) -> "Pool | ReferencePool":
    """Choose who keeps the blocks' states: the native pool, which evicts as `Lru` does, or its twin."""
    if native is not None and type(eviction) is Lru:
        pool: Pool = native.Pool(num_blocks)
        return pool
    return ReferencePool(num_blocks, eviction)
