"""The blocks of one tier: who holds them, and which prefix each one caches.

A block is in one of three states: free, referenced by at least one sequence, or idle (cached and referenced by
nobody, to be evicted when free ones run out). State is lists indexed by block id, not an object per block.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.wire import HashArray, PackedHashes, pack_hashes
from penstock.kv.eviction import EvictionPolicy, Lru

_LOW64_BYTES = 8


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
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size: must be >= 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tier = tier
        self._eviction = eviction if eviction is not None else Lru()
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, BlockId] = {}
        self._free = [BlockId(index) for index in reversed(range(num_blocks))]
        self._idle: OrderedDict[BlockId, None] = OrderedDict()  # longest unused first
        self._events: list[KvEvent] = []
        self._removed: list[bytes] = []  # evicted since the last event, told as one

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` can give: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_active(self) -> int:
        """How many blocks sequences hold."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """How many hashes are resident."""
        return len(self._by_hash)

    def match(self, block_hashes: HashArray) -> list[BlockId]:
        """Find the resident blocks of the longest cached prefix; they are not referenced yet.

        Args:
            block_hashes: (n, 2) uint64, chained.
        """
        found = []
        for key in _keys(block_hashes):
            block_id = self._by_hash.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_idle(self, block_ids: Sequence[BlockId]) -> int:
        """Count those of `block_ids` whose `acquire` lowers `num_available`."""
        return sum(block_id in self._idle for block_id in block_ids)

    def acquire(self, block_ids: Sequence[BlockId]) -> None:
        """Reference blocks that `match` found, once more each."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._idle[block_id]
            self._references[block_id] += 1

    def allocate(self, count: int) -> list[BlockId] | None:
        """Take `count` blocks with one reference each, evicting idle ones as needed; None if there are not as many."""
        if count > self.num_available:
            return None
        if count > len(self._free):
            self._evict(count - len(self._free))
        start = len(self._free) - count
        block_ids = self._free[start:]
        block_ids.reverse()  # ascending ids while the pool is fresh
        del self._free[start:]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference each of a sequence's blocks, given in its order; tails become evictable first."""
        for block_id in reversed(block_ids):
            references = self._references[block_id] - 1
            if references < 0:
                raise AssertionError(f"block {block_id} was released more often than it was taken")
            self._references[block_id] = references
            if references == 0:
                if self._hash_of[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._idle[block_id] = None

    def commit(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        """Publish referenced blocks whose content is complete; those of hashes that are resident stay private.

        Args:
            block_ids: (n,) consecutive blocks of one sequence.
            block_hashes: (n, 2) uint64, their names.
            parent: low64 of the block before the first, None at the root.
        """
        keys = _keys(block_hashes)
        if len(keys) != len(block_ids):
            raise ValueError(f"commit: {len(block_ids)} blocks need as many hashes, got {len(keys)}")
        run_start = 0  # new blocks in a row are one event; resident ones end a run
        for index, (block_id, key) in enumerate(zip(block_ids, keys, strict=True)):
            if key in self._by_hash:
                self._tell_stored(block_hashes, run_start, index, parent)
                run_start = index + 1
            else:
                if self._hash_of[block_id] is not None or self._references[block_id] == 0:
                    raise AssertionError(f"block {block_id} was committed before, or is held by nobody")
                self._by_hash[key] = block_id
                self._hash_of[block_id] = key
        self._tell_stored(block_hashes, run_start, len(keys), parent)

    def reset(self) -> None:
        """Forget all cached content; referenced blocks stay with their sequences, as private ones."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._by_hash.clear()
        self._hash_of = [None] * self.num_blocks
        self._removed.clear()
        self._events.append(AllBlocksCleared())

    def take_events(self) -> tuple[KvEvent, ...]:
        """Hand over what changed since the last call, in order."""
        self._tell_removed()
        events = tuple(self._events)
        self._events.clear()
        return events

    def resident_hashes(self) -> HashArray:
        """List the (n, 2) uint64 hashes in the cache, in no order."""
        return np.frombuffer(b"".join(self._by_hash), dtype="<u8").reshape(-1, 2)

    def references(self) -> dict[BlockId, int]:
        """Count the references of every block that has any, to check them against their holders."""
        return {BlockId(index): number for index, number in enumerate(self._references) if number}

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(self._idle), "a block is both free and idle"
        for block_id in range(self.num_blocks):
            references, key = self._references[block_id], self._hash_of[block_id]
            state = (references > 0, block_id in free, block_id in self._idle)
            assert sum(state) == 1, (
                f"block {block_id}: {references} references, free {state[1]}, idle {state[2]}"
            )
            assert not (block_id in free and key is not None), f"block {block_id} is free but has a hash"
            assert not (block_id in self._idle and key is None), f"block {block_id} is idle but has no hash"
            assert key is None or self._by_hash.get(key) == block_id, (
                f"block {block_id}: its hash names another"
            )
        named = sum(key is not None for key in self._hash_of)
        assert named == len(self._by_hash), f"{len(self._by_hash)} hashes name {named} blocks"

    def _evict(self, count: int) -> None:
        for block_id in self._eviction.victims(self._idle, count):
            del self._idle[block_id]
            key = self._hash_of[block_id]
            assert key is not None
            del self._by_hash[key]
            self._hash_of[block_id] = None
            self._free.append(block_id)
            self._removed.append(key[:_LOW64_BYTES])

    def _tell_stored(self, block_hashes: HashArray, start: int, end: int, parent: int | None) -> None:
        if start == end:
            return
        self._tell_removed()
        self._events.append(
            BlockStored(
                block_hashes=pack_hashes(block_hashes[start:end, 0]),
                parent_block_hash=int(block_hashes[start - 1, 0]) if start else parent,
                block_size=self.block_size,
                tier=self.tier,
            )
        )

    def _tell_removed(self) -> None:
        if self._removed:
            packed = PackedHashes(b"".join(self._removed))
            self._removed.clear()
            self._events.append(BlockRemoved(block_hashes=packed, tier=self.tier))


def _keys(block_hashes: HashArray) -> list[bytes]:
    """Split (n, 2) hashes into dict keys of 16 bytes; low64 are the first 8."""
    return np.ascontiguousarray(block_hashes, dtype="<u8").view("V16").ravel().tolist()
