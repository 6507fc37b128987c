"""The prefix index: which workers hold which prefixes, in which tier.

The native tree where it is installed, else the Python reference, which is also the native tree's oracle. A block's hash names
its whole prefix, so one map from hash to holders is the whole tree: a request's hashes, looked up in order, walk a path from the
root. In the reference, holders are bits of one int, so that a step of the walk is one lookup and one `and`, however many workers
there are. The maps hold plain ints only, which the garbage collector does not visit.
"""

import heapq
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.hashing import DEFAULT_KEY, as_tokens, block_hashes_python, root_hash
from penstock.core.native import native
from penstock.core.types.events import COPIES_MAX, Copies, Tier
from penstock.core.wire import (
    HashArray,
    Hashes,
    PackedHashes,
    TokenArray,
    hash_list,
    pack_hashes,
    unpack_hashes,
)

_TIERS = tuple(Tier)


class PrefixMatch:
    """What each worker holds of a prefix; for several prefixes the arrays have one more dimension in front.

    `depths` is (num_slots,) int32: the leading blocks that a worker holds in any tier. `tiers` is
    (num_tiers, num_slots) int32: how many of these lie in each tier, nearest tier first; a block counts in its nearest tier.
    """

    __slots__ = ("_tiers", "depths")

    def __init__(self, depths: NDArray[np.int32], tiers: NDArray[np.int32] | None = None) -> None:
        """Without `tiers` all blocks lie in the first tier."""
        self.depths = depths
        self._tiers = tiers

    @property
    def tiers(self) -> NDArray[np.int32]:
        if self._tiers is None:
            lower = np.zeros_like(self.depths)
            self._tiers = np.stack([self.depths, *[lower] * (len(_TIERS) - 1)], axis=-2)
        return self._tiers


class RadixStats(NamedTuple):
    """`pairs` counts (worker, block); `evicted_pairs` were forgotten for want of room.

    `unknown_removals` are removals of what was not held: of evicted pairs, or an engine's error.
    `contradictions` are blocks told with another parent than before, which is an engine's error. `num_bytes` is the
    memory in use; the Python reference counts its largest tables only.
    """

    nodes: int
    pairs: int
    evicted_pairs: int
    unknown_removals: int
    contradictions: int
    num_bytes: int


class HeldBlocks(NamedTuple):
    """One copy of each block of a chain; the arguments of `store`."""

    worker: int
    hashes: PackedHashes
    parent: int | None
    tier: Tier


class _Tree(Protocol):
    @property
    def num_slots(self) -> int: ...

    def counts(self) -> tuple[int, int, int, int, int, int]: ...

    def runs(self, worker: int) -> list[tuple[PackedHashes, int | None, Copies]]: ...

    def match_packed_tokens(
        self, tokens: TokenArray, block_size: int, first: tuple[int, int], key: bytes
    ) -> PrefixMatch: ...


class RadixCalls:
    """Calls of both trees."""

    def match_tokens(
        self: _Tree,
        token_ids: Sequence[int] | TokenArray | bytes,
        block_size: int,
        salt: bytes = b"",
        *,
        key: bytes = DEFAULT_KEY,
    ) -> PrefixMatch:
        """Hash a prompt's full blocks as `block_hashes` does, and match them.

        Raises:
            ValueError: as `block_hashes`.
        """
        if block_size < 1:
            raise ValueError(f"block_size: must be >= 1, got {block_size}")
        first = root_hash(block_size, salt, key=key)
        return self.match_packed_tokens(as_tokens(token_ids), block_size, first, key)

    def snapshot(self: _Tree, worker: int | None = None) -> Iterator[HeldBlocks]:
        """Give the content of all workers or of one, as calls of `store`: parents before children."""
        for slot in range(self.num_slots) if worker is None else (worker,):
            for hashes, parent, copies in self.runs(slot):
                for tier, count in zip(_TIERS, copies, strict=True):
                    for _ in range(count):
                        yield HeldBlocks(slot, hashes, parent, tier)

    def hashes_of(self: _Tree, worker: int) -> HashArray:
        """Give the distinct blocks a worker is known to hold, parents before children."""
        return unpack_hashes(b"".join(hashes for hashes, _, _ in self.runs(worker)))

    def stats(self: _Tree) -> RadixStats:
        return RadixStats._make(self.counts())


SLOTS_MAX = 65_535
_COPY_BITS = 12
_SHIFTS = {tier: _COPY_BITS * index for index, tier in enumerate(_TIERS)}
_FEW = 8  # below this many workers a Python loop over bits is faster than numpy


class RadixTreePython(RadixCalls):
    """Prefix index over all workers and tiers.

    An engine may store equal blocks several times and remove each copy on its own, so copies count, per worker,
    hash and tier. The size is bounded: past `pairs_max` the leaf that was stored or matched last the longest
    time ago is forgotten, which costs a wrong guess and never a wrong answer.

    Hashes are `low64` of chained block hashes. As each names its whole prefix, `match` may look at them in any
    order: a list that is no chain gets a depth of little meaning. Any thread may call the native tree, in which long
    calls let others run and matches run beside each other; of this reference one task is the owner.
    """

    def __init__(self, pairs_max: int | None, num_slots: int = 1) -> None:
        """Make an empty tree.

        Args:
            pairs_max: bound of (worker, block) pairs; None for what is bounded otherwise, as a worker's own
                blocks are.
            num_slots: length of what `match` returns; it grows with the slots used.
        """
        self.pairs_max = pairs_max
        self.num_slots = 0
        self._holders: dict[int, int] = {}  # hash -> bit set of slots
        self._parents: dict[int, int] = {}  # hash -> parent, where it has one
        self._children: dict[int, int] = {}  # hash -> how many known nodes have it as parent
        self._used: dict[int, int] = {}  # hash -> when it was stored or ended a match
        self._held: list[dict[int, int]] = []  # by slot: hash -> copies by tier
        self._lower: list[int] = []  # by slot: how many blocks are not on the device
        self._sources: dict[int, tuple[int, ...]] = {}  # slot -> whose blocks it loads, too
        self._loaders: dict[int, int] = {}  # slot -> bit set of those that load its blocks
        self._leaves: list[tuple[int, int]] = []  # heap of (used, hash); entries may be stale
        self._clock = 0
        self._pairs = 0
        self._evicted_pairs = 0
        self._unknown_removals = 0
        self._contradictions = 0
        self.grow(num_slots)

    def store(self, worker: int, hashes: Hashes, parent: int | None = None, tier: Tier = Tier.DEVICE) -> None:
        """Note one more copy of each block; beyond 4,095 on one worker in one tier, further ones do not count.

        Args:
            worker: a slot; a new one grows the tree.
            hashes: each the parent of the next.
            parent: the block before the first, None at the root.
            tier: where they lie.

        Raises:
            ValueError: the slot is not from 0 to 65,534.
        """
        self._grow_to_hold(worker)
        held, holders = self._held[worker], self._holders
        bit, shift = 1 << worker, _SHIFTS[tier]
        self._clock += 1
        for block_hash in hash_list(hashes):
            copies = held.get(block_hash, 0)
            mask = holders.get(block_hash)
            if mask is None:
                self._add_node(block_hash, parent)
                mask = 0
            elif self._parents.get(block_hash) != parent:
                self._contradictions += 1
            if copies >> shift & COPIES_MAX < COPIES_MAX:
                self._set_copies(worker, block_hash, copies + (1 << shift))
            holders[block_hash] = mask | bit
            self._used[block_hash] = self._clock
            parent = block_hash
        self._evict()

    def remove(self, worker: int, hashes: Hashes, tier: Tier = Tier.DEVICE) -> None:
        """Note one copy less of each block; those not held are counted and otherwise ignored."""
        self._grow_to_hold(worker)
        held, shift = self._held[worker], _SHIFTS[tier]
        for block_hash in hash_list(hashes):
            copies = held.get(block_hash, 0)
            if not copies >> shift & COPIES_MAX:
                self._unknown_removals += 1
                continue
            copies -= 1 << shift
            if copies:
                self._set_copies(worker, block_hash, copies)
            else:
                self._drop_pair(worker, block_hash)

    def clear(self, worker: int) -> None:
        """Forget all that a worker holds.

        It counts and matches no more from now on. The native tree takes time for what it is told or asked, and not for all
        that it holds: its `nodes` and bytes go down as that is reclaimed.
        """
        if worker >= self.num_slots:
            return
        held, self._held[worker] = self._held[worker], {}
        self._lower[worker] = 0
        self._pairs -= len(held)
        holders, others = self._holders, ~(1 << worker)
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

    def reclaim(self, blocks: int) -> bool:  # noqa: ARG002 - the native tree's share of work
        """Look at this many blocks for what cleared workers held; each `store` does some of it, too.

        Until that is done, blocks before those do not count as leaves.

        Returns:
            Whether there is more to reclaim.
        """
        return False

    def share(self, worker: int, sources: Sequence[int]) -> None:
        """From now on a worker also loads what these slots hold, and no longer what others did; a match counts it as the worker's.

        Such slots are no workers: a host, or an object store. Their own depths are 0 while anybody loads what they hold.

        Raises:
            ValueError: a slot would be shared and have sources, or is not from 0 to 65,534.
        """
        wanted = tuple(sorted(set(sources)))
        for slot in (worker, *wanted):
            self._grow_to_hold(slot)
        if wanted and (
            worker in self._loaders or worker in wanted or not self._sources.keys().isdisjoint(wanted)
        ):
            raise ValueError(
                f"sources: a slot is shared by workers or loads what others share, not both, got {wanted[0]} for {worker}"
            )
        for source in self._sources.pop(worker, ()):
            self._loaders[source] &= ~(1 << worker)
            if not self._loaders[source]:
                del self._loaders[source]
        for source in wanted:
            self._loaders[source] = self._loaders.get(source, 0) | 1 << worker
        if wanted:
            self._sources[worker] = wanted

    def match(self, hashes: Hashes) -> PrefixMatch:
        """Count, per worker, the leading blocks it can load from any tier; nothing after the first missing one."""
        depths = np.zeros(self.num_slots, dtype=np.int32)
        alive = -1
        last, depth = None, 0
        holders, loaders = self._holders, self._loaders
        path = hash_list(hashes)
        for depth, block_hash in enumerate(path):
            mask = holders.get(block_hash, 0)
            for source in loaders:
                if mask >> source & 1:
                    mask = mask & ~(1 << source) | loaders[source]
            still = alive & mask
            if still != alive:
                if alive > 0:
                    self._set_bits(depths, alive ^ still, depth)
                alive = still
                if not alive:
                    break
            last = block_hash
        else:
            depth = len(path)
        if alive > 0:
            self._set_bits(depths, alive, depth)
        if last is not None:
            self._clock += 1
            self._used[last] = self._clock
        return PrefixMatch(depths, self._count_tiers(path, depths) if any(self._lower) else None)

    def match_many(self, queries: Sequence[Hashes]) -> PrefixMatch:
        """Match several prefixes; row i of the result is that of the i-th."""
        matches = [self.match(query) for query in queries]
        shape = (len(matches), self.num_slots)
        depths = np.array([match.depths for match in matches], dtype=np.int32).reshape(shape)
        if not any(self._lower):
            return PrefixMatch(depths)
        tiers = np.array([match.tiers for match in matches], dtype=np.int32)
        return PrefixMatch(depths, tiers.reshape(len(matches), len(_TIERS), self.num_slots))

    def match_packed_tokens(
        self, tokens: TokenArray, block_size: int, first: tuple[int, int], key: bytes
    ) -> PrefixMatch:
        """Hash a prompt's blocks from the root `first` on, and match them."""
        return self.match(block_hashes_python(tokens, block_size, first, {}, key)[:, 0])

    def held_blocks(self, worker: int) -> int:
        """Count the distinct blocks a worker is known to hold."""
        return len(self._held[worker]) if worker < self.num_slots else 0

    def allow(self, pairs_max: int) -> None:
        """Hold so many pairs at most from now on; never fewer than before."""
        if self.pairs_max is not None:
            self.pairs_max = max(self.pairs_max, pairs_max)

    def grow(self, num_slots: int) -> None:
        """Have at least this many slots."""
        if num_slots > SLOTS_MAX:
            raise ValueError(
                f"num_slots: must be <= {SLOTS_MAX}, got {num_slots}; divide the workers among several trees"
            )
        if num_slots > self.num_slots:
            self._held.extend({} for _ in range(num_slots - self.num_slots))
            self._lower.extend([0] * (num_slots - self.num_slots))
            self.num_slots = num_slots

    def _grow_to_hold(self, worker: int) -> None:
        if not 0 <= worker < SLOTS_MAX:
            raise ValueError(
                f"worker: must be a slot from 0 to {SLOTS_MAX - 1}, got {worker}; give each worker the lowest number that"
                " is free"
            )
        self.grow(worker + 1)

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Give the fields of `RadixStats`, in their order."""
        maps = (self._holders, self._parents, self._children, self._used)
        return (
            len(self._holders),
            self._pairs,
            self._evicted_pairs,
            self._unknown_removals,
            self._contradictions,
            sum(map(sys.getsizeof, maps)),
        )

    def runs(self, worker: int) -> list[tuple[PackedHashes, int | None, Copies]]:
        """Give what a worker holds as chains of blocks held alike, parents first: hashes, parent, copies."""
        runs: list[tuple[list[int], int | None, int]] = []
        held = self._held[worker] if worker < self.num_slots else {}
        latest, latest_copies = None, 0
        for block_hash in self._parents_first(held):
            parent, copies = self._parents.get(block_hash), held[block_hash]
            if parent is None or parent != latest or copies != latest_copies:
                runs.append(([], parent, copies))
            runs[-1][0].append(block_hash)
            latest, latest_copies = block_hash, copies
        return [
            (pack_hashes(hashes), parent, tuple(copies >> _SHIFTS[tier] & COPIES_MAX for tier in _TIERS))
            for hashes, parent, copies in runs
        ]

    def check(self) -> None:
        """Raise AssertionError where a map disagrees with another."""
        holders: dict[int, int] = {}
        for slot, held in enumerate(self._held):
            for block_hash, copies in held.items():
                assert copies > 0, f"slot {slot}: block {block_hash:x} is kept with {copies} copies"
                holders[block_hash] = holders.get(block_hash, 0) | 1 << slot
        assert holders == self._holders, "holders: the bits are the workers that hold the block"
        assert self._pairs == sum(map(len, self._held)), f"{self._pairs} pairs are counted"
        assert self.pairs_max is None or self._pairs <= self.pairs_max, f"{self._pairs} pairs: past the bound"
        lower = [sum(not copies & COPIES_MAX for copies in held.values()) for held in self._held]
        assert lower == self._lower, "lower: counts the blocks that are not on the device"
        assert self._used.keys() == holders.keys(), "used: kept exactly for the nodes"
        assert self._parents.keys() <= holders.keys(), "parents: kept for nodes only"
        children: dict[int, int] = {}
        for parent in self._parents.values():
            children[parent] = children.get(parent, 0) + 1
        assert children == self._children, "children: counted from the parents"
        sharing: dict[int, int] = {}
        for worker, sources in self._sources.items():
            for source in sources:
                sharing[source] = sharing.get(source, 0) | 1 << worker
        assert sharing == self._loaders, "loaders: those that have it as a source"
        assert self._sources.keys().isdisjoint(sharing), "sources: who has some is none"
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

    def _set_copies(self, worker: int, block_hash: int, copies: int) -> None:
        held = self._held[worker]
        before = held.get(block_hash)
        held[block_hash] = copies
        self._pairs += before is None
        self._lower[worker] += not copies & COPIES_MAX
        if before is not None:
            self._lower[worker] -= not before & COPIES_MAX

    def _drop_pair(self, worker: int, block_hash: int) -> None:
        self._lower[worker] -= not self._held[worker].pop(block_hash) & COPIES_MAX
        self._pairs -= 1
        self._holders[block_hash] &= ~(1 << worker)
        if not self._holders[block_hash]:
            del self._holders[block_hash]
            self._unlink(block_hash)

    def _unlink(self, block_hash: int) -> None:
        """Remove a block without holders from the tree."""
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
        while self.pairs_max is not None and self._pairs > self.pairs_max:
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
        return min(
            self._holders, key=lambda h: (self._used[h], h)
        )  # parents in a circle: a worker told nonsense

    def _parents_first(self, held: dict[int, int]) -> Iterator[int]:
        """Order blocks so that each comes after its parent, if that is held, and chains stay in one piece."""
        children: dict[int, list[int]] = {}
        roots = []
        for block_hash in held:
            parent = self._parents.get(block_hash)
            if parent in held:
                children.setdefault(parent, []).append(block_hash)
            else:
                roots.append(block_hash)
        seen: set[int] = set()
        for start in (*roots, *held):  # the latter reaches those whose parents go in a circle
            waiting = [start]
            while waiting:
                block_hash = waiting.pop()
                if block_hash not in seen:
                    seen.add(block_hash)
                    yield block_hash
                    waiting.extend(children.get(block_hash, ()))

    def _count_tiers(self, path: list[int], depths: NDArray[np.int32]) -> NDArray[np.int32]:
        tiers = np.zeros((len(_TIERS), self.num_slots), dtype=np.int32)
        tiers[0] = depths
        for worker in np.flatnonzero(depths).tolist():
            loads = (worker, *self._sources.get(worker, ()))
            if any(self._lower[slot] for slot in loads):
                held = [self._held[slot] for slot in loads]
                best = [
                    min(_tier_of(each.get(block, 0)) for each in held) for block in path[: depths[worker]]
                ]
                tiers[:, worker] = np.bincount(best, minlength=len(_TIERS))
        return tiers


def _tier_of(copies: int) -> int:
    """Give the index of the nearest tier with a copy; past the last one without any."""
    return ((copies & -copies).bit_length() - 1) // _COPY_BITS if copies else len(_TIERS)


if TYPE_CHECKING or native is None:
    RadixTree = RadixTreePython
else:

    class RadixTree(RadixCalls, native.RadixTree):
        """Does what its reference says."""

        __doc__ = RadixTreePython.__doc__
