"""Python reference of the native `Eviction`: which idle block of a pool goes first, leaf first.

A leaf is an idle block that no idle block has as its parent. Of the lowest priority the leaf goes that is expected to lose
the fewest seconds: the learned chance of its reuse, times what a token of its prefix costs. Among equal ones the leaf whose
last use is older goes. This copy looks at all leaves each time; the native one keeps them in heaps.
"""

import math
from dataclasses import dataclass

from penstock.core.ids import BlockId
from penstock.kv.pool.reuse import ReuseTable
from penstock.kv.pool.use import BlockUse, PrefillPrice

_GHOSTS_PER_BLOCK = 4
"""Evicted blocks that are remembered, for each block of the pool."""


@dataclass(slots=True)
class _Block:
    """What is known of a cached block; times are counted in blocks evicted, or taken for the first time."""

    depth: int
    last: int
    order: int = 0
    unused: int = 0
    until_s: float = math.inf
    uses: int = 0
    segment: int = 0
    """Class of the `ReuseTable`."""
    priority: int = 0
    kind: int = 0
    watched: int = 0
    """Octaves of its age that the `ReuseTable` has counted."""


@dataclass(slots=True)
class _Ghost:
    """What is remembered of an evicted block."""

    last: int
    uses: int
    segment: int
    watched: int


class _Ghosts:
    """Evicted blocks by their hash. A block that came back still takes its place until that place's turn is over."""

    def __init__(self, most: int) -> None:
        self._ring: list[bytes | None] = []
        self._most = most
        self._next = 0
        self._kept: dict[bytes, tuple[int, _Ghost]] = {}

    def put(self, key: bytes, ghost: _Ghost) -> _Ghost | None:
        """Remember a block; return the one that is forgotten for it."""
        dropped = None
        if len(self._ring) < self._most:
            self._next = len(self._ring)
            self._ring.append(None)
        else:
            old = self._ring[self._next]
            if old is not None:
                dropped = self._kept.pop(old)[1]
        self._ring[self._next] = key
        self._kept[key] = self._next, ghost
        self._next = (self._next + 1) % self._most
        return dropped

    def take(self, key: bytes) -> _Ghost | None:
        """Return and forget a block that is cached again; None for an unknown one."""
        found = self._kept.pop(key, None)
        if found is None:
            return None
        self._ring[found[0]] = None
        return found[1]

    def clear(self) -> None:
        self._ring.clear()
        self._kept.clear()
        self._next = 0


class Eviction:
    """Orders the leaves of a pool by expected seconds lost; `ReferencePool` says what happens to blocks."""

    def __init__(self, num_blocks: int, block_size: int, price: PrefillPrice) -> None:
        self._block_size = block_size
        self._price = price
        self._reuse = ReuseTable(num_blocks)
        self._ghosts = _Ghosts(_GHOSTS_PER_BLOCK * num_blocks)
        self._blocks: dict[BlockId, _Block] = {}
        self._leaves: set[BlockId] = set()
        self._now = 0
        self._order = 0

    # ---- what happens to blocks
    def first_taken(self) -> None:
        """A block of the pool is taken for the first time."""
        self._now += 1

    def commit(self, block_id: BlockId, key: bytes, depth: int) -> None:
        """A block enters the cache as the `depth`-th of its prefix."""
        block = self._blocks[block_id] = _Block(depth, self._now)
        block.segment = self._class_of(block)
        ghost = self._ghosts.take(key)
        if ghost is not None:
            block.segment, block.uses, block.last = ghost.segment, ghost.uses, ghost.last
            block.unused, block.watched = self._now - ghost.last, ghost.watched

    def use(self, block_id: BlockId, use: BlockUse) -> None:
        """A request that held the block ends."""
        block = self._blocks[block_id]
        block.kind = use.kind
        if block.uses > 0:
            self._reuse.add(block.segment, block.watched, block.unused, is_reused=True)
        self._touch(block)
        block.uses += 1
        block.unused, block.watched, block.last = 0, 0, self._now
        block.segment = self._class_of(block)
        if use.priority >= block.priority or block.until_s == math.inf:
            block.priority, block.until_s = use.priority, use.until_s

    def hold(self, block_id: BlockId) -> None:
        """An idle block is held again."""
        block = self._blocks[block_id]
        block.unused = self._now - block.last

    def evicted(self, block_id: BlockId, key: bytes) -> None:
        self._now += 1
        block = self._blocks.pop(block_id)
        if block.uses > 0:
            unused = self._now - block.last
            watched = self._reuse.add(block.segment, block.watched, unused, is_reused=False)
            dropped = self._ghosts.put(key, _Ghost(block.last, block.uses, block.segment, watched))
            if dropped is not None:
                unused = self._now - dropped.last
                self._reuse.add(dropped.segment, dropped.watched, unused, is_reused=False)

    def forgotten(self, block_id: BlockId) -> None:
        """The content of a held block was wrong."""
        del self._blocks[block_id]

    def reset(self) -> None:
        self._blocks.clear()
        self._leaves.clear()
        self._ghosts.clear()

    def expire(self, now_s: float, most: int) -> None:
        """Priorities up to that time end, of so many blocks."""
        over = [
            (block.until_s, block_id) for block_id, block in self._blocks.items() if block.until_s <= now_s
        ]
        for _, block_id in sorted(over)[:most]:
            self._blocks[block_id].until_s, self._blocks[block_id].priority = math.inf, 0

    def set_price(self, price: PrefillPrice) -> None:
        """Set what a lost token costs from now on."""
        self._price = price

    # ---- leaves
    def is_leaf(self, block_id: BlockId) -> bool:
        return block_id in self._leaves

    def add_leaf(self, block_id: BlockId) -> None:
        block = self._blocks[block_id]
        if block.order == 0:
            self._touch(block)
        self._leaves.add(block_id)

    def remove_leaf(self, block_id: BlockId) -> None:
        self._leaves.remove(block_id)

    def victim(self) -> BlockId | None:
        """Return the leaf that goes first; None without leaves."""
        if not self._leaves:
            return None
        lowest = min(self._blocks[leaf].priority for leaf in self._leaves)
        heads: dict[int, BlockId] = {}  # of a class only the longest unused is looked at
        for leaf in self._leaves:
            block = self._blocks[leaf]
            if block.priority == lowest:
                head = heads.get(block.segment)
                if head is None or block.order < self._blocks[head].order:
                    heads[block.segment] = leaf
        return min(heads.values(), key=self.standing)

    def standing(self, leaf: BlockId) -> tuple[int, float, int]:
        """Return what leaves are compared by; the lowest goes."""
        block = self._blocks[leaf]
        chance = self._reuse.index(block.segment, self._now - block.last)
        return block.priority, chance * self._weight(block.depth), block.order

    def _class_of(self, block: _Block) -> int:
        return ReuseTable.class_of(block.uses, block.depth * self._block_size, block.kind)

    def _touch(self, block: _Block) -> None:
        self._order += 1
        block.order = self._order

    def _weight(self, depth: int) -> float:
        """Mean seconds of a token up to that depth: if the prefix goes, all its blocks go, not only the dearest last one."""
        token_s, deeper_s, load_s = self._price
        return min(load_s, token_s + deeper_s * (depth * self._block_size) * 0.5)
