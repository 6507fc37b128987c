"""A tier's index over a `BlockPool`: finds the blocks of a prefix, and publishes new ones."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.native import native
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.wire import HashArray, PackedHashes
from penstock.kv.eviction import PRIORITY_MAX, PRIORITY_MIN, BlockUse, EvictionPolicy, PrefillPrice
from penstock.kv.reference_pool import Change, ChangeKind, ReferencePool
from penstock.transfer.storage.slots import Records

if TYPE_CHECKING:
    from penstock._native import Pool


_STORED, _REMOVED = int(ChangeKind.STORED), int(ChangeKind.REMOVED)  # an enum's members compare in Python


class Evicted(NamedTuple):
    """A chain of evicted blocks, each the parent of the next. Their content stays intact until they are written to.

    block_hashes: (n, 2) uint64
    parent:       low64 of the first block's parent, None at the root
    """

    block_ids: list[BlockId]
    block_hashes: HashArray
    parent: int | None


class BlockPool:
    """Reference-counted blocks with a prefix cache keyed by 128-bit hash.

    Several blocks may have equal content: the first one committed is cached, the others stay private to their sequence and
    are freed with it. Events name hashes, so duplicates cause no event.
    A block can outlive its parent in the cache, for example if a sequence holds a private duplicate of the parent. `match`
    then stops before the block until the parent is committed again.
    Not thread-safe; one task owns it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        eviction: EvictionPolicy = "lru",
        tier: Tier = Tier.DEVICE,
        *,
        price: PrefillPrice | None = None,
        tenant_share: float = 1.0,
        in_python: bool = False,
    ) -> None:
        """Start with all blocks free.

        Args:
            num_blocks: size; block ids are 0 to `num_blocks` - 1.
            block_size: tokens in a block.
            eviction: which idle block goes first. `lru` keeps one list and knows no priorities; `seconds` never evicts a
                block before its idle children.
            tier: where the blocks are, for events.
            price: what a lost block costs, for `seconds`.
            tenant_share: most of the blocks that requests of one tenant have used last and nobody uses now; past it the
                tenant's own go first: of 32 that may go, others each time, the one that the policy would evict. 1 is no bound.
            in_python: keep the states in the Python reference, many times slower, to compare with it.

        Raises:
            ValueError: num_blocks or block_size < 1.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size: must be >= 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tier = tier
        tenant_blocks = int(tenant_share * num_blocks)
        self._counts_uses = eviction != "lru" or tenant_blocks < num_blocks
        price = price or PrefillPrice()
        self._states: Pool | ReferencePool = (
            ReferencePool(num_blocks, eviction, block_size, price, tenant_blocks)
            if native is None or in_python
            else native.Pool(num_blocks, eviction, block_size, *price, tenant_blocks)
        )

    @property
    def native(self) -> "Pool | None":
        """The native state, for native code that shares it; None if the Python reference keeps it."""
        return None if isinstance(self._states, ReferencePool) else self._states

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can return: free and idle ones."""
        return self._states.num_available

    @property
    def num_active(self) -> int:
        """Referenced blocks."""
        return self._states.num_active

    @property
    def num_cached(self) -> int:
        """Hashes in the prefix cache."""
        return self._states.num_cached

    def match(self, block_hashes: HashArray) -> list[BlockId]:
        """Find the blocks of the longest cached prefix, without referencing them.

        Args:
            block_hashes: (n, 2) uint64, chained.
        """
        return self._states.match(block_hashes)

    def count_idle(self, block_ids: Sequence[BlockId]) -> int:
        """Count those of `block_ids` whose `acquire` lowers `num_available`."""
        return self._states.count_idle(block_ids)

    def acquire(self, block_ids: Sequence[BlockId]) -> None:
        """Add a reference to each of the blocks, which `match` has found."""
        self._states.acquire(block_ids)

    def make_room(self, count: int) -> list[Evicted]:
        """Evict idle blocks until `count` blocks are free, if so many are available.

        Returns:
            the evicted chains, in the order of eviction. `allocate` evicts too, but does not return what.
        """
        return _chains(self._states.make_room(count))

    def allocate(self, count: int) -> list[BlockId] | None:
        """Allocate `count` blocks with one reference each, evicting idle ones as needed; None if fewer are available."""
        return self._states.allocate(count)

    def release(self, block_ids: Sequence[BlockId], use: BlockUse | None = None) -> None:
        """Drop one reference of each of a sequence's blocks, given in its order; tails become evictable first.

        Args:
            use: what the blocks were used for, at the end of a request; counts one use of each. None counts none: the
                blocks were only copied or pinned, or the request comes back.

        Raises:
            ValueError: the priority is not from -8 to 7, or its end is not a number.
        """
        if use is None or not self._counts_uses:
            self._states.release(block_ids)
        elif not PRIORITY_MIN <= use.priority <= PRIORITY_MAX or math.isnan(use.until_s):
            raise ValueError(
                f"use: needs a priority from {PRIORITY_MIN} to {PRIORITY_MAX} and a time of its end, got {use.priority} and {use.until_s}"
            )
        else:
            self._states.release(block_ids, int(use.kind), use.priority, use.until_s, use.tenant)

    def set_price(self, price: PrefillPrice) -> None:
        """Set what a lost token costs from now on, for `seconds`."""
        self._states.set_price(*price)

    def expire(self, now_s: float, most: int) -> None:
        """End the priorities of uses whose `until_s` is reached, of at most so many blocks, the earliest first."""
        self._states.expire(now_s, most)

    def commit(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        """Put referenced blocks with complete content into the prefix cache; duplicates of cached hashes stay private.

        Args:
            block_ids: (n,) consecutive blocks of one sequence.
            block_hashes: (n, 2) uint64, hashes of these blocks.
            parent: low64 of the first block's parent, None at the root.

        Raises:
            ValueError: the numbers of blocks and hashes differ.
        """
        self._states.commit(block_ids, block_hashes, parent)

    def forget(self, block_ids: Sequence[BlockId]) -> None:
        """Drop referenced blocks from the prefix cache, since their content is wrong; they stay with their holders, as private ones."""
        self._states.forget(block_ids)

    def reset(self) -> None:
        """Clear the prefix cache; referenced blocks stay with their sequences, as private ones."""
        self._states.reset()

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call, in order."""
        return tuple([self._event(change) for change in self._states.take_changes()])

    def resident_hashes(self) -> HashArray:
        """Return the (n, 2) uint64 hashes in the cache, in no particular order."""
        return np.frombuffer(self._states.resident_hashes(), dtype="<u8").reshape(-1, 2)

    def idle_blocks(self) -> list[BlockId]:
        """Return the cached blocks that nothing references, the one unused for longest first."""
        return self._states.idle_blocks()

    def references(self) -> dict[BlockId, int]:
        """Count the references of every referenced block, to check them against their holders."""
        return self._states.references()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
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


def _chains(evicted: Sequence[tuple[list[BlockId], bytes, int | None]]) -> list[Evicted]:
    return [
        Evicted(block_ids, np.frombuffer(hashes, dtype="<u8").reshape(-1, 2), parent)
        for block_ids, hashes, parent in evicted
    ]


class PinnedPool(Protocol):
    """The pool methods that pins use."""

    def match(self, block_hashes: HashArray) -> list[BlockId]: ...

    def acquire(self, block_ids: Sequence[BlockId]) -> None: ...

    def allocate(self, count: int) -> list[BlockId] | None: ...

    def release(self, block_ids: Sequence[BlockId]) -> None: ...

    def commit(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None: ...


class Pins:
    """The pins of one pool. Only `unpin` ends them; callers enforce time limits. Not thread-safe; one task owns it."""

    def __init__(self, pool: PinnedPool, on_change: Callable[[], None]) -> None:
        """Make an empty set.

        Args:
            pool: the engine's pool.
            on_change: called when blocks were unpinned or published, since requests may wait for that.
        """
        self._pool = pool
        self._on_change = on_change
        self._held: Counter[BlockId] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def pin(self, block_hashes: HashArray) -> list[BlockId]:
        """Pin the longest resident prefix.

        Args:
            block_hashes: (n, 2) uint64, chained.

        Returns:
            (m,) block ids with m <= n: pinning stops at the first block that is not resident.
        """
        block_ids = self._pool.match(block_hashes)
        self._pool.acquire(block_ids)
        self._held.update(block_ids)
        return block_ids

    def pin_named(self, names: HashArray) -> list[BlockId]:
        """Pin the leading blocks of `names` that are resident, for a transfer that names all blocks which it moves."""
        return self.pin(names)

    def reserve(self, count: int) -> list[BlockId] | None:
        """Pin `count` free blocks, whose content is to be written; None if fewer are available."""
        block_ids = self._pool.allocate(count)
        if block_ids is not None:
            self._held.update(block_ids)
        return block_ids

    def hold(self, block_ids: Sequence[BlockId]) -> None:
        """Pin blocks that a sequence holds too."""
        self._pool.acquire(block_ids)
        self._held.update(block_ids)

    def pass_on(self, block_ids: Sequence[BlockId]) -> None:
        """Drop pins but keep the references, which the caller takes over."""
        self._forget(block_ids)

    def publish(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        """Put pinned blocks with complete content into the prefix cache. They stay pinned.

        Args:
            block_ids: (n,) each the child of the one before it.
            block_hashes: (n, 2) uint64, hashes of these blocks.
            parent: low64 of the first block's parent, None at the root.

        Raises:
            ValueError: the numbers of blocks and hashes differ.
        """
        self._pool.commit(block_ids, block_hashes, parent)
        self._on_change()

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Unpin blocks, given in the order of their sequence; published ones stay cached until they are evicted."""
        self._forget(block_ids)
        self._pool.release(block_ids)
        self._on_change()

    def holders(self) -> dict[BlockId, int]:
        """Count the pins of each block, to check the pool's references."""
        return dict(self._held)

    def _forget(self, block_ids: Sequence[BlockId]) -> None:
        held = self._held
        for block_id in block_ids:
            times = held.get(block_id, 0)
            assert times, "unpinned more often than pinned"
            if times > 1:
                held[block_id] = times - 1
            else:
                del held[block_id]


def block_keys(hashes: HashArray) -> list[bytes]:
    """Return each hash as 16 bytes."""
    keys: list[bytes] = np.ascontiguousarray(hashes, dtype="<u8").view("V16").ravel().tolist()
    return keys


def split_prefix(pool: BlockPool, hashes: HashArray) -> tuple[list[BlockId], list[int]]:
    """Split a prefix into the blocks that a pool keeps, and the indexes of the missing ones.

    Args:
        pool: the tier's.
        hashes: (n, 2) uint64, of a prefix from its first block on.
    """
    held: list[BlockId] = []
    missing: list[int] = []
    index = 0
    while index < len(hashes):
        found = pool.match(hashes[index:])
        held += found
        index += len(found)
        if index < len(hashes):
            missing.append(index)
            index += 1
    return held, missing


def commit_runs(
    pool: BlockPool, hashes: HashArray, indexes: Sequence[int], block_ids: Sequence[BlockId]
) -> None:
    """Publish blocks of a prefix; each run of neighbours becomes one event.

    Args:
        pool: the tier's.
        hashes: (n, 2) uint64, of a prefix from its first block on.
        indexes: (m,) ascending, of the blocks in the prefix.
        block_ids: (m,) the pool's blocks, referenced.
    """
    start = 0
    for end in range(1, len(indexes) + 1):
        if end == len(indexes) or indexes[end] != indexes[end - 1] + 1:
            first, last = indexes[start], indexes[end - 1]
            parent = int(hashes[first - 1, 0]) if first else None
            pool.commit(block_ids[start:end], hashes[first : last + 1], parent)
            start = end


def commit_chains(pool: BlockPool, slots: NDArray[np.intp], records: Records) -> None:
    """Publish blocks in the order in which they were stored, each chain of them as one event.

    Args:
        pool: the tier's.
        slots: (n,) the pool's blocks, referenced.
        records: (n,) of them.
    """
    order = np.argsort(records["generation"], kind="stable")
    numbers = [BlockId(slot) for slot in slots[order].tolist()]
    hashes, parents = np.ascontiguousarray(records["hash"][order]), records["parent"][order]
    begins = np.concatenate([[True], parents[1:] != hashes[:-1, 0]])[: len(numbers)]
    for start, end in pairwise([*np.flatnonzero(begins).tolist(), len(numbers)]):
        pool.commit(numbers[start:end], hashes[start:end], int(parents[start]) or None)
