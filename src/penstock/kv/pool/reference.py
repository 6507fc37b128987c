"""Python reference of the native `Pool`; also used without native code.

State is lists indexed by block id, not an object per block.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.pool.eviction import Eviction
from penstock.kv.pool.tenants import NOBODY, Tenants
from penstock.kv.pool.use import BlockUse, EvictionPolicy, PrefillPrice, UseKind

_LOW64_BYTES = 8
_HASH_BYTES = 16
_TENANT_LEAVES = 32
"""Of a tenant past its share so many leaves are compared for a victim."""


class ChangeKind(IntEnum):
    """Kind of a change of the cache; the native pool returns the plain numbers."""

    STORED = 0
    REMOVED = 1
    CLEARED = 2


Change = tuple[int, bytes, int | None]
"""(kind, packed low64 of the hashes, low64 of the parent of the first block of a stored run)."""

Evicted = tuple[list[BlockId], bytes, int | None]
"""(evicted blocks, each the parent of the next; their hashes of 16 bytes; low64 of the parent of the first)."""


class ReferencePool:
    """Reference-counted blocks with a prefix cache; `BlockPool` documents the methods.

    Not thread-safe; one task owns it.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: EvictionPolicy,
        block_size: int = 1,
        price: PrefillPrice | None = None,
        tenant_blocks: int | None = None,
    ) -> None:
        self._num_blocks = num_blocks
        self._eviction = (
            None if policy == "lru" else Eviction(num_blocks, block_size, price or PrefillPrice())
        )
        """None: the order is that of `_idle`."""
        self._tenants = (
            None if tenant_blocks is None or tenant_blocks >= num_blocks else Tenants(tenant_blocks)
        )
        self._prefixes = _Prefixes()
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._parent_of: list[int | None] = [None] * num_blocks
        self._by_hash: dict[bytes, BlockId] = {}
        self._free = [BlockId(index) for index in reversed(range(num_blocks))]
        self._num_taken = 0
        self._idle: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self._changes: list[Change] = []
        self._removed: list[bytes] = []  # evicted since the last change, reported as one change

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_active(self) -> int:
        return self._num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return len(self._by_hash)

    def match(self, hashes: HashArray) -> list[BlockId]:
        found = []
        for key in _keys(hashes):
            block_id = self._by_hash.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_idle(self, ids: Sequence[BlockId]) -> int:
        return sum(block_id in self._idle for block_id in ids)

    def acquire(self, ids: Sequence[BlockId]) -> None:
        for block_id in ids:
            if self._references[block_id] == 0:
                if block_id not in self._idle:
                    raise AssertionError(f"block {block_id} is free: only what match found can be acquired")
                self._leave_idle(block_id)
            self._references[block_id] += 1

    def make_room(self, count: int) -> list[Evicted]:
        if not len(self._free) < count <= self.num_available:
            return []
        return self._chains(self._evict(count - len(self._free)))

    def _chains(self, victims: list[tuple[BlockId, bytes]]) -> list[Evicted]:
        """Join victims, in the order of eviction, to chains; of one sequence the first block goes last."""
        chains: list[Evicted] = []
        for block_id, key in reversed(victims):
            parent = self._parent_of[block_id]
            if chains and parent == _low64(chains[-1][1][-_HASH_BYTES:]):
                ids, keys, first_parent = chains[-1]
                chains[-1] = ([*ids, block_id], keys + key, first_parent)
            else:
                chains.append(([block_id], key, parent))
        return chains[::-1]

    def allocate(self, count: int) -> list[BlockId] | None:
        if count > self.num_available:
            return None
        if count > len(self._free):
            self._evict(count - len(self._free))
        start = len(self._free) - count
        ids = self._free[start:]
        ids.reverse()  # ascending ids while the pool is fresh
        del self._free[start:]
        for block_id in ids:
            self._references[block_id] = 1
            if block_id >= self._num_taken:  # never-used ones come in order
                self._num_taken = block_id + 1
                if self._eviction is not None:
                    self._eviction.first_taken()
        return ids

    def release(
        self,
        ids: Sequence[BlockId],
        kind: int | None = None,
        priority: int = 0,
        until_s: float = math.inf,
        tenant: int = NOBODY,
    ) -> None:
        for block_id in reversed(ids):
            references = self._references[block_id] - 1
            if references < 0:
                raise AssertionError(f"block {block_id} was released more often than it was taken")
            if kind is not None and self._hash_of[block_id] is not None:
                if self._eviction is not None:
                    self._eviction.use(block_id, BlockUse(UseKind(kind), priority, until_s))
                if self._tenants is not None:
                    self._tenants.own(block_id, tenant)
            self._references[block_id] = references
            if references == 0:
                if self._hash_of[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._enter_idle(block_id)

    def set_price(self, token_s: float, deeper_s: float, load_s: float) -> None:
        if self._eviction is not None:
            self._eviction.set_price(PrefillPrice(token_s, deeper_s, load_s))

    def expire(self, now_s: float, most: int) -> None:
        if self._eviction is not None:
            self._eviction.expire(now_s, most)

    def commit(self, ids: Sequence[BlockId], hashes: HashArray, parent: int | None) -> None:
        keys = _keys(hashes)
        if len(keys) != len(ids):
            raise ValueError(f"commit: {len(ids)} blocks need as many hashes, got {len(keys)}")
        run_start = 0  # consecutive new blocks are one change; a resident one ends the run
        for index, (block_id, key) in enumerate(zip(ids, keys, strict=True)):
            if key in self._by_hash:
                self._add_stored(hashes, run_start, index, parent)
                run_start = index + 1
            else:
                if self._hash_of[block_id] is not None or self._references[block_id] == 0:
                    raise AssertionError(f"block {block_id} was committed before, or is held by nobody")
                self._by_hash[key] = block_id
                self._hash_of[block_id] = key
                self._parent_of[block_id] = int(hashes[index - 1, 0]) if index else parent
                if self._tenants is not None:
                    self._tenants.own(block_id, NOBODY)
                if self._eviction is not None:
                    self._eviction.commit(block_id, key, self._prefixes.add(key, self._parent_of[block_id]))
        self._add_stored(hashes, run_start, len(keys), parent)

    def forget(self, ids: Sequence[BlockId]) -> None:
        for block_id in ids:
            if self._references[block_id] == 0:
                raise AssertionError(f"block {block_id} is held by nobody")
            key = self._hash_of[block_id]
            if key is not None:
                del self._by_hash[key]
                self._hash_of[block_id] = None
                if self._eviction is not None:
                    self._eviction.forgotten(block_id)
                    self._prefixes.remove(key)
                self._removed.append(key[:_LOW64_BYTES])

    def reset(self) -> None:
        if self._eviction is not None:
            self._eviction.reset()
            self._prefixes = _Prefixes()
        if self._tenants is not None:
            self._tenants.reset()
        self._free.extend(self._idle)
        self._idle.clear()
        self._by_hash.clear()
        self._hash_of = [None] * self._num_blocks
        self._removed.clear()
        self._changes.append((ChangeKind.CLEARED, b"", None))

    def take_changes(self) -> list[Change]:
        """Return the changes since the last call, in order."""
        self._add_removed()
        changes, self._changes = self._changes, []
        return changes

    def resident_hashes(self) -> bytes:
        """Join the 16 bytes of each hash in the cache, in no particular order."""
        return b"".join(self._by_hash)

    def idle_blocks(self) -> list[BlockId]:
        """Return the idle blocks, the one unused for longest first."""
        return list(self._idle)

    def references(self) -> dict[BlockId, int]:
        return {BlockId(index): number for index, number in enumerate(self._references) if number}

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(self._idle), "a block is both free and idle"
        for block_id in range(self._num_blocks):
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
        if self._eviction is not None:
            for block_id in self._idle:
                if self._prefixes.idle.get(self._low_of(block_id)) == block_id:
                    has_children = self._prefixes.idle_children[self._low_of(block_id)] > 0
                    assert self._eviction.is_leaf(block_id) != has_children, (
                        f"block {block_id}: a leaf has no idle children"
                    )
        named = sum(key is not None for key in self._hash_of)
        assert named == len(self._by_hash), f"{len(self._by_hash)} hashes name {named} blocks"

    def _evict(self, count: int) -> list[tuple[BlockId, bytes]]:
        gone = []
        for _ in range(count):
            victim = self._victim_of_tenant()
            if victim is None and self._eviction is not None:
                victim = self._eviction.victim()
            # Without a leaf the parents lead in a circle: no chain of hashes does, but callers may err.
            block_id = next(iter(self._idle)) if victim is None else victim
            key = self._hash_of[block_id]
            assert key is not None
            self._leave_idle(block_id)
            del self._by_hash[key]
            self._hash_of[block_id] = None
            if self._eviction is not None:
                self._eviction.evicted(block_id, key)
                self._prefixes.remove(key)
            self._free.append(block_id)
            self._removed.append(key[:_LOW64_BYTES])
            gone.append((block_id, key))
        return gone

    def _victim_of_tenant(self) -> BlockId | None:
        """Choose, of a few leaves of a tenant past its share, the one that goes first by the policy."""
        if self._tenants is None:
            return None
        if self._eviction is None:
            return self._tenants.first()
        return min(self._tenants.sample(_TENANT_LEAVES), key=self._eviction.standing, default=None)

    def _add_leaf(self, block_id: BlockId) -> None:
        if self._eviction is not None:
            self._eviction.add_leaf(block_id)
        if self._tenants is not None:
            self._tenants.add_leaf(block_id)

    def _remove_leaf(self, block_id: BlockId) -> None:
        if self._eviction is not None:
            self._eviction.remove_leaf(block_id)
        if self._tenants is not None:
            self._tenants.remove_leaf(block_id)

    def _enter_idle(self, block_id: BlockId) -> None:
        self._idle[block_id] = None
        if self._tenants is not None:
            self._tenants.enter_idle(block_id)
        if self._eviction is None:
            self._add_leaf(block_id)
            return
        low, parent = self._low_of(block_id), self._parent_of[block_id]
        self._prefixes.idle[low] = block_id
        if self._prefixes.idle_children[low] == 0:
            self._add_leaf(block_id)
        if parent is not None:
            self._prefixes.idle_children[parent] += 1
            above = self._prefixes.idle.get(parent)
            is_first = self._prefixes.idle_children[parent] == 1
            if is_first and above is not None and self._eviction.is_leaf(above):
                self._remove_leaf(above)

    def _leave_idle(self, block_id: BlockId) -> None:
        del self._idle[block_id]
        if self._eviction is None:
            self._remove_leaf(block_id)
            if self._tenants is not None:
                self._tenants.leave_idle(block_id)
            return
        low, parent = self._low_of(block_id), self._parent_of[block_id]
        if self._prefixes.idle.get(low) == block_id:
            del self._prefixes.idle[low]
        if self._eviction.is_leaf(block_id):
            self._remove_leaf(block_id)
        if self._tenants is not None:
            self._tenants.leave_idle(block_id)
        self._eviction.hold(block_id)
        if parent is not None:
            above = self._prefixes.idle.get(parent)
            is_last = self._prefixes.idle_children[parent] == 1
            if is_last and above is not None and not self._eviction.is_leaf(above):
                self._add_leaf(above)
            self._prefixes.idle_children[parent] -= 1

    def _low_of(self, block_id: BlockId) -> int:
        return _low64(self._key_of(block_id))

    def _key_of(self, block_id: BlockId) -> bytes:
        key = self._hash_of[block_id]
        assert key is not None
        return key

    def _add_stored(self, hashes: HashArray, start: int, end: int, parent: int | None) -> None:
        if start == end:
            return
        self._add_removed()
        packed = hashes[start:end, 0].astype("<u8", copy=False).tobytes()
        before = int(hashes[start - 1, 0]) if start else parent
        self._changes.append((ChangeKind.STORED, packed, before))

    def _add_removed(self) -> None:
        if self._removed:
            self._changes.append((ChangeKind.REMOVED, b"".join(self._removed), None))
            self._removed.clear()


class _Prefixes:
    """Cached blocks as a tree, by the low halves of their hashes."""

    def __init__(self) -> None:
        self.idle: dict[int, BlockId] = {}
        self.idle_children: Counter[int] = Counter()
        self._cached: Counter[int] = Counter()
        self._depths: dict[int, int] = {}

    def add(self, key: bytes, parent: int | None) -> int:
        """Add a cached block; return its depth, 0 without a cached parent."""
        depth = self._depths[parent] + 1 if parent is not None and self._cached[parent] else 0
        self._depths[_low64(key)] = depth
        self._cached[_low64(key)] += 1
        return depth

    def remove(self, key: bytes) -> None:
        self._cached[_low64(key)] -= 1


def _low64(key: bytes) -> int:
    return int.from_bytes(key[:_LOW64_BYTES], "little")


def _keys(hashes: HashArray) -> list[bytes]:
    """Split (n, 2) hashes into dict keys of 16 bytes; low64 are the first 8."""
    return np.ascontiguousarray(hashes, dtype="<u8").view("V16").ravel().tolist()
