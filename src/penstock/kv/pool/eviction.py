"""Python reference of the native `Eviction`: which idle block of a pool goes first, by a key and leaf first.

A leaf is an idle block that no idle block has as its parent. The leaf of the lowest (priority, key) goes; among equal keys
the one whose last use is older. This copy looks at all leaves each time; the native one keeps them in heaps.

Sources: LFU with dynamic ageing, Arlitt et al. 2000; ARC, Megiddo and Modha 2003; S3-FIFO, Yang et al. 2023.
"""

import math
from dataclasses import dataclass

from penstock.core.ids import BlockId
from penstock.kv.pool.reuse import ReuseTable
from penstock.kv.pool.use import BlockUse, EvictionPolicy, PrefillPrice

_GHOSTS_PER_BLOCK = 4
"""Evicted blocks that `Seconds` remembers, for each block of the pool; the queues remember one."""
_S3_USES_MAX = 3


@dataclass(slots=True)
class _Block:
    """What is known of a cached block; times are counted in blocks evicted, or taken for the first time."""

    depth: int
    last: int
    order: int = 0
    unused: int = 0
    key: float = 0.0
    until_s: float = math.inf
    uses: int = 0
    segment: int = 0
    priority: int = 0
    kind: int = 0
    watched: int = 0
    """Octaves of its age that the `ReuseTable` has counted."""


@dataclass(slots=True)
class _Ghost:
    """What is remembered of an evicted block."""

    last: int = 0
    uses: int = 0
    segment: int = 0
    watched: int = 0


class Ghosts:
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
    """What all policies share: leaves, priorities and their ends. `ReferencePool` says what happens to blocks."""

    def __init__(self, num_blocks: int, ghosts: int = 0) -> None:
        self._num_blocks = num_blocks
        self._blocks: dict[BlockId, _Block] = {}
        self._leaves: set[BlockId] = set()
        self._ghosts = Ghosts(ghosts) if ghosts else None
        self._now = 0
        self._order = 0

    # ---- what a policy says
    def _enter(self, block: _Block, ghost: _Ghost | None) -> None:
        """Set what a block that enters the cache begins with; `ghost` is what is remembered of it."""

    def _use(self, block: _Block) -> None:
        """Note one use."""
        raise NotImplementedError

    def _key(self, block: _Block) -> float:
        """Return the key of a leaf; the lowest goes."""
        return block.key

    def _gone(self, block: _Block, key: bytes) -> None:
        """Note that a block was evicted."""

    def _left(self, block: _Block) -> None:
        """Note that a block left the cache, evicted or not."""

    def _first_key(self) -> float:
        """Return the key of a block that no request used."""
        return float(self._order)

    # ---- what happens to blocks
    def first_taken(self) -> None:
        """A block of the pool is taken for the first time."""
        self._now += 1

    def commit(self, block_id: BlockId, key: bytes, depth: int) -> None:
        """A block enters the cache as the `depth`-th of its prefix."""
        block = self._blocks[block_id] = _Block(depth, self._now)
        self._enter(block, self._ghosts.take(key) if self._ghosts is not None else None)

    def use(self, block_id: BlockId, use: BlockUse) -> None:
        """A request that held the block ends."""
        block = self._blocks[block_id]
        block.kind = use.kind
        self._use(block)
        if use.priority >= block.priority or block.until_s == math.inf:
            block.priority, block.until_s = use.priority, use.until_s

    def hold(self, block_id: BlockId) -> None:
        """An idle block is held again."""
        block = self._blocks[block_id]
        block.unused = self._now - block.last

    def evicted(self, block_id: BlockId, key: bytes) -> None:
        self._now += 1
        block = self._blocks.pop(block_id)
        self._left(block)
        self._gone(block, key)

    def forgotten(self, block_id: BlockId) -> None:
        """The content of a held block was wrong."""
        self._left(self._blocks.pop(block_id))

    def reset(self) -> None:
        self._blocks.clear()
        self._leaves.clear()
        if self._ghosts is not None:
            self._ghosts.clear()

    def expire(self, now_s: float, most: int) -> None:
        """Priorities up to that time end, of so many blocks."""
        over = [
            (block.until_s, block_id) for block_id, block in self._blocks.items() if block.until_s <= now_s
        ]
        for _, block_id in sorted(over)[:most]:
            self._blocks[block_id].until_s, self._blocks[block_id].priority = math.inf, 0

    # ---- leaves
    def is_leaf(self, block_id: BlockId) -> bool:
        return block_id in self._leaves

    def add_leaf(self, block_id: BlockId) -> None:
        block = self._blocks[block_id]
        if block.order == 0:
            self._order += 1
            block.order = self._order
            block.key = self._first_key()
        self._leaves.add(block_id)

    def remove_leaf(self, block_id: BlockId) -> None:
        self._leaves.remove(block_id)

    def victim(self) -> BlockId | None:
        """Return the leaf that goes first; None without leaves."""
        if not self._leaves:
            return None
        lowest = min(self._blocks[leaf].priority for leaf in self._leaves)
        return self._head([leaf for leaf in self._leaves if self._blocks[leaf].priority == lowest])

    def standing(self, leaf: BlockId) -> tuple[int, float, int]:
        """Return what leaves are compared by; the lowest goes."""
        block = self._blocks[leaf]
        return block.priority, self._key(block), block.order

    def set_price(self, price: PrefillPrice) -> None:
        """Set what a lost token costs from now on, for policies that ask."""

    def _head(self, leaves: list[BlockId]) -> BlockId:
        return min(leaves, key=lambda leaf: (self._key(self._blocks[leaf]), self._blocks[leaf].order))

    def _touch(self, block: _Block) -> None:
        self._order += 1
        block.order = self._order
        block.key = float(self._order)


class Lfu(Eviction):
    """Least frequently used; a new block starts at the key of the last one that went, so that old fame fades."""

    _floor = 0.0

    def _use(self, block: _Block) -> None:
        self._touch(block)
        block.uses += 1
        block.key = self._floor + block.uses

    def _first_key(self) -> float:
        return self._floor

    def _head(self, leaves: list[BlockId]) -> BlockId:
        first = super()._head(leaves)
        self._floor = max(self._floor, self._blocks[first].key)
        return first


class _Queues(Eviction):
    """Blocks in two queues, of those used once and of those used again."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, ghosts=num_blocks)
        self._num_cached = [0, 0]
        self._num_ghosts = [0, 0]

    def _enter(self, block: _Block, ghost: _Ghost | None) -> None:
        block.segment = int(ghost is not None)
        self._num_cached[block.segment] += 1

    def _left(self, block: _Block) -> None:
        self._num_cached[block.segment] -= 1

    def _head_of(self, leaves: list[BlockId], queue: int) -> BlockId:
        """Return the head of that queue, or of the other one if no leaf is in it."""
        in_queue = [leaf for leaf in leaves if self._blocks[leaf].segment == queue]
        return super()._head(in_queue or leaves)

    def reset(self) -> None:
        super().reset()
        self._num_cached = [0, 0]
        self._num_ghosts = [0, 0]


class Arc(_Queues):
    """Adaptive replacement: evicted blocks that come back say which queue is too short."""

    _target = 0.0

    def _enter(self, block: _Block, ghost: _Ghost | None) -> None:
        if ghost is not None:
            ours, others = self._num_ghosts[ghost.segment], self._num_ghosts[1 - ghost.segment]
            step = max(1.0, others / ours)
            if ghost.segment == 0:
                self._target = min(float(self._num_blocks), self._target + step)
            else:
                self._target = max(0.0, self._target - step)
            self._num_ghosts[ghost.segment] -= 1
        super()._enter(block, ghost)

    def _use(self, block: _Block) -> None:
        self._touch(block)
        block.uses += 1
        if block.uses > 1 and block.segment == 0:
            self._num_cached[0] -= 1
            self._num_cached[1] += 1
            block.segment = 1

    def _gone(self, block: _Block, key: bytes) -> None:
        assert self._ghosts is not None
        self._num_ghosts[block.segment] += 1
        dropped = self._ghosts.put(key, _Ghost(segment=block.segment))
        if dropped is not None:
            self._num_ghosts[dropped.segment] -= 1

    def _head(self, leaves: list[BlockId]) -> BlockId:
        return self._head_of(leaves, 0 if self._num_cached[0] > self._target else 1)


class S3Fifo(_Queues):
    """Three queues: a short one that most blocks leave unused, a long one with further rounds for used ones, and ghosts."""

    def _use(self, block: _Block) -> None:
        if block.order == 0:
            self._touch(block)
        else:
            block.uses = min(_S3_USES_MAX, block.uses + 1)

    def _gone(self, block: _Block, key: bytes) -> None:
        if block.segment == 0:
            assert self._ghosts is not None
            self._ghosts.put(key, _Ghost())

    def _head(self, leaves: list[BlockId]) -> BlockId:
        while True:
            leaf = self._head_of(leaves, 0 if self._num_cached[0] * 10 > self._num_blocks else 1)
            block = self._blocks[leaf]
            if block.uses == 0:
                return leaf
            self._num_cached[block.segment] -= 1
            block.uses = block.uses - 1 if block.segment else 0
            block.segment = 1
            self._num_cached[1] += 1
            self._touch(block)


class Seconds(Eviction):
    """Fewest expected seconds lost: the learned chance of reuse, times what a token of the block's prefix costs."""

    def __init__(self, num_blocks: int, block_size: int, price: PrefillPrice) -> None:
        super().__init__(num_blocks, ghosts=_GHOSTS_PER_BLOCK * num_blocks)
        self._block_size = block_size
        self._price = price
        self._reuse = ReuseTable(num_blocks)

    def _enter(self, block: _Block, ghost: _Ghost | None) -> None:
        block.segment = ReuseTable.class_of(0, block.depth * self._block_size, 0)
        if ghost is not None:
            block.segment, block.uses, block.last = ghost.segment, ghost.uses, ghost.last
            block.unused, block.watched = self._now - ghost.last, ghost.watched

    def _use(self, block: _Block) -> None:
        if block.uses > 0:
            self._reuse.add(block.segment, block.watched, block.unused, is_reused=True)
        self._touch(block)
        block.uses += 1
        block.unused, block.watched, block.last = 0, 0, self._now
        block.segment = ReuseTable.class_of(block.uses, block.depth * self._block_size, block.kind)

    def _head(self, leaves: list[BlockId]) -> BlockId:
        heads: dict[int, BlockId] = {}  # of a class only the longest unused is looked at
        for leaf in leaves:
            block = self._blocks[leaf]
            head = heads.get(block.segment)
            if head is None or block.order < self._blocks[head].order:
                heads[block.segment] = leaf
        return super()._head(list(heads.values()))

    def _key(self, block: _Block) -> float:
        return self._reuse.index(block.segment, self._now - block.last) * self._weight(block.depth)

    def set_price(self, price: PrefillPrice) -> None:
        self._price = price

    def _weight(self, depth: int) -> float:
        """Mean seconds of a token up to that depth: if the prefix goes, all its blocks go, not only the dearest last one."""
        token_s, deeper_s, load_s = self._price
        return min(load_s, token_s + deeper_s * (depth * self._block_size) * 0.5)

    def _gone(self, block: _Block, key: bytes) -> None:
        if block.uses > 0:
            assert self._ghosts is not None
            unused = self._now - block.last
            watched = self._reuse.add(block.segment, block.watched, unused, is_reused=False)
            dropped = self._ghosts.put(key, _Ghost(block.last, block.uses, block.segment, watched))
            if dropped is not None:
                unused = self._now - dropped.last
                self._reuse.add(dropped.segment, dropped.watched, unused, is_reused=False)


def make_eviction(
    policy: EvictionPolicy, num_blocks: int, block_size: int, price: PrefillPrice
) -> Eviction | None:
    """Make the reference of a policy; None for lru, whose order is the pool's own list of idle blocks."""
    match policy:
        case "lru":
            return None
        case "lfu":
            return Lfu(num_blocks)
        case "arc":
            return Arc(num_blocks)
        case "s3-fifo":
            return S3Fifo(num_blocks)
        case "seconds":
            return Seconds(num_blocks, block_size, price)
