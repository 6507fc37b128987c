"""Which workers hold which prefixes.

A block's hash names its whole prefix, so one map from hash to holders is the whole tree: a request's hashes,
looked up in order, walk a path from the root. Holders are bits of one int, so that a step of the walk is one
lookup and one `and`, however many workers there are. The maps hold plain ints only, which the garbage
collector does not visit.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Tier
from penstock.core.wire import HashArray

_SHIFTS = {tier: 32 * index for index, tier in enumerate(Tier)}  # a pair's copies, 32 bits per tier
_COPIES_MASK = 0xFFFF_FFFF
_FEW = 8  # below this many workers a Python loop over bits is faster than numpy


@dataclass(frozen=True, slots=True)
class RadixStats:
    """`pairs` counts (worker, block); `evicted_pairs` were forgotten for want of room.

    `unknown_removals` are removals of what was not held: of evicted pairs, or an engine's error.
    """

    nodes: int
    pairs: int
    evicted_pairs: int
    unknown_removals: int


class RadixTree:
    """Prefix index over all workers and tiers. Not thread-safe; one task owns it.

    An engine may store equal blocks several times and remove each copy on its own, so copies count, per worker,
    hash and tier. The size is bounded: past `pairs_max` the leaf that was stored or matched last the longest
    time ago is forgotten, which costs a wrong guess and never a wrong answer.
    """

    def __init__(self, pairs_max: int, num_slots: int = 1) -> None:
        """Make an empty tree.

        Args:
            pairs_max: bound of (worker, block) pairs.
            num_slots: length of what `match` returns; it grows with the slots used.
        """
        self.pairs_max = pairs_max
        self.num_slots = num_slots
        self._holders: dict[int, int] = {}  # hash -> bit set of slots
        self._parents: dict[int, int] = {}  # hash -> parent, where it has one
        self._children: dict[int, int] = {}  # hash -> how many known nodes have it as parent
        self._used: dict[int, int] = {}  # hash -> when it was stored or ended a match
        self._held: list[dict[int, int]] = [{} for _ in range(num_slots)]  # by slot: hash -> copies by tier
        self._leaves: list[tuple[int, int]] = []  # heap of (used, hash); entries may be stale
        self._clock = 0
        self._pairs = 0
        self._evicted_pairs = 0
        self._unknown_removals = 0

    def store(
        self, worker_slot: int, hashes: HashArray, parent: int | None = None, tier: Tier = Tier.DEVICE
    ) -> None:
        """Note one more copy of each block.

        Args:
            worker_slot: any; a new one grows the tree.
            hashes: (n,) uint64, `low64`, each the parent of the next.
            parent: the block before the first, None at the root.
            tier: where they lie.
        """
        self.grow(worker_slot + 1)
        held, holders = self._held[worker_slot], self._holders
        bit, copy = 1 << worker_slot, 1 << _SHIFTS[tier]
        self._clock += 1
        for block_hash in hashes.tolist():
            copies = held.get(block_hash, 0)
            held[block_hash] = copies + copy
            if not copies:
                self._pairs += 1
                mask = holders.get(block_hash)
                if mask is None:
                    self._add_node(block_hash, parent)
                    mask = 0
                holders[block_hash] = mask | bit
            self._used[block_hash] = self._clock
            parent = block_hash
        if self._pairs > self.pairs_max:
            self._evict()

    def remove(self, worker_slot: int, hashes: HashArray, tier: Tier = Tier.DEVICE) -> None:
        """Note one copy less of each block; those not held are counted and otherwise ignored."""
        self.grow(worker_slot + 1)
        held, shift = self._held[worker_slot], _SHIFTS[tier]
        for block_hash in hashes.tolist():
            copies = held.get(block_hash, 0)
            if not copies >> shift & _COPIES_MASK:
                self._unknown_removals += 1
                continue
            copies -= 1 << shift
            if copies:
                held[block_hash] = copies
            else:
                self._drop_pair(worker_slot, block_hash)

    def clear(self, worker_slot: int) -> None:
        """Forget all that a worker holds."""
        if worker_slot >= self.num_slots:
            return
        held, self._held[worker_slot] = self._held[worker_slot], {}
        self._pairs -= len(held)
        holders, others = self._holders, ~(1 << worker_slot)
        gone = []
        for block_hash in held:
            mask = holders[block_hash] & others
            if mask:
                holders[block_hash] = mask
            else:
                del holders[block_hash]
                gone.append(block_hash)
        for block_hash in gone:  # once all are out, so that no parent among them is taken for a leaf
            self._unlink(block_hash)

    def match(self, hashes: HashArray) -> NDArray[np.int32]:
        """Count, per worker, the leading blocks it holds in any tier; nothing after the first missing one.

        Args:
            hashes: (n,) uint64, `low64` of a request's blocks.

        Returns:
            (num_slots,) int32.
        """
        depths = np.zeros(self.num_slots, dtype=np.int32)
        alive = -1
        last, depth = None, 0
        holders = self._holders
        for depth, block_hash in enumerate(hashes.tolist()):
            still = alive & holders.get(block_hash, 0)
            if still != alive:
                if alive > 0:
                    self._set_bits(depths, alive ^ still, depth)
                alive = still
                if not alive:
                    break
            last = block_hash
        else:
            depth = len(hashes)
        if alive > 0:
            self._set_bits(depths, alive, depth)
        if last is not None:
            self._clock += 1
            self._used[last] = self._clock
        return depths

    def held_blocks(self, worker_slot: int) -> int:
        """Count the distinct blocks a worker is known to hold."""
        return len(self._held[worker_slot]) if worker_slot < self.num_slots else 0

    def grow(self, num_slots: int) -> None:
        """Have at least this many slots."""
        if num_slots > self.num_slots:
            self._held.extend({} for _ in range(num_slots - self.num_slots))
            self.num_slots = num_slots

    def stats(self) -> RadixStats:
        return RadixStats(
            nodes=len(self._holders),
            pairs=self._pairs,
            evicted_pairs=self._evicted_pairs,
            unknown_removals=self._unknown_removals,
        )

    def check(self) -> None:
        """Raise AssertionError where a map disagrees with another."""
        holders: dict[int, int] = {}
        for slot, held in enumerate(self._held):
            for block_hash, copies in held.items():
                assert copies > 0, f"slot {slot}: block {block_hash:x} is kept with {copies} copies"
                holders[block_hash] = holders.get(block_hash, 0) | 1 << slot
        assert holders == self._holders, "holders: the bits are the workers that hold the block"
        assert self._pairs == sum(map(len, self._held)) <= self.pairs_max, (
            f"{self._pairs} pairs are counted of {self.pairs_max}"
        )
        assert self._used.keys() == holders.keys(), "used: kept exactly for the nodes"
        assert self._parents.keys() <= holders.keys(), "parents: kept for nodes only"
        children: dict[int, int] = {}
        for parent in self._parents.values():
            children[parent] = children.get(parent, 0) + 1
        assert children == self._children, "children: counted from the parents"
        leaves = {block_hash for _, block_hash in self._leaves}
        assert holders.keys() - children.keys() <= leaves, "leaves: each can be found for eviction"
        assert all(used <= self._used.get(h, used) for used, h in self._leaves), "leaves: none is too young"

    @staticmethod
    def _set_bits(depths: NDArray[np.int32], mask: int, depth: int) -> None:
        if mask.bit_count() <= _FEW:
            while mask:
                low = mask & -mask
                depths[low.bit_length() - 1] = depth
                mask ^= low
        else:
            packed = np.frombuffer(mask.to_bytes((len(depths) + 7) // 8, "little"), dtype=np.uint8)
            depths[np.unpackbits(packed, count=len(depths), bitorder="little").view(np.bool_)] = depth

    def _add_node(self, block_hash: int, parent: int | None) -> None:
        if parent is not None:
            self._parents[block_hash] = parent
            self._children[parent] = self._children.get(parent, 0) + 1
        self._used[block_hash] = self._clock
        if block_hash not in self._children:
            self._push_leaf(block_hash)

    def _drop_pair(self, worker_slot: int, block_hash: int) -> None:
        del self._held[worker_slot][block_hash]
        self._pairs -= 1
        self._holders[block_hash] &= ~(1 << worker_slot)
        if not self._holders[block_hash]:
            del self._holders[block_hash]
            self._unlink(block_hash)

    def _unlink(self, block_hash: int) -> None:
        """Take a block that nobody holds any more out of the tree's shape."""
        del self._used[block_hash]
        parent = self._parents.pop(block_hash, None)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._holders:
                self._push_leaf(parent)

    def _push_leaf(self, block_hash: int) -> None:
        heapq.heappush(self._leaves, (self._used[block_hash], block_hash))
        if len(self._leaves) > 2 * len(self._holders) + 1024:
            live = {h for _, h in self._leaves if h in self._holders and h not in self._children}
            self._leaves = [(self._used[h], h) for h in live]
            heapq.heapify(self._leaves)

    def _evict(self) -> None:
        while self._pairs > self.pairs_max:
            victim = self._oldest_leaf()
            mask = self._holders[victim]
            self._evicted_pairs += mask.bit_count()
            while mask:
                low = mask & -mask
                self._drop_pair(low.bit_length() - 1, victim)
                mask ^= low

    def _oldest_leaf(self) -> int:
        while self._leaves:
            used, block_hash = heapq.heappop(self._leaves)
            now = self._used.get(block_hash)
            if now is None or block_hash in self._children:
                continue  # gone, or no leaf any more
            if now == used:
                return block_hash
            heapq.heappush(self._leaves, (now, block_hash))
        return next(iter(self._holders))  # parents that go in a circle: a worker told nonsense
