"""The prefix index: the native tree and its Python reference side by side, and both against a model in plain dictionaries."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.types.events import Tier
from penstock.router.radix import RadixTree, RadixTreePython

SLOTS = st.integers(0, 11)
TIERS = st.sampled_from(list(Tier))
# Chains of a small forest: hash h has parent h // 3 and roots are 1 and 2, so that prefixes are shared.
NODES = st.integers(1, 80)
UNKNOWN = st.integers(100, 102)


def chain_to(node: int) -> list[int]:
    path = []
    while node:
        path.append(node)
        node //= 3
    return path[::-1]


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def contents(tree) -> Counter[tuple[int, int, int | None, Tier]]:
    """Give copies by (worker, hash, parent, tier), checking that no block comes before its parent."""
    found: Counter[tuple[int, int, int | None, Tier]] = Counter()
    seen = set()
    late = set()
    for worker, hashes, first_parent, tier in tree.snapshot():
        parent = first_parent
        for block_hash in np.frombuffer(hashes, dtype=np.uint64).tolist():
            if parent is not None and (worker, parent) not in seen:
                late.add((worker, parent))
            seen.add((worker, block_hash))
            found[worker, block_hash, parent, tier] += 1
            parent = block_hash
    assert not late & seen, "a block comes before its parent, which is held too"
    return found


class BothTrees(RuleBasedStateMachine):
    """The native tree and its reference, which keep count, bounds and invariants alike."""

    def begin(self, pairs_max):
        self.native, self.reference = RadixTree(pairs_max), RadixTreePython(pairs_max)
        self.bounded = pairs_max is not None
        self.reclaiming = False

    @rule()
    def reclaim_all(self):
        while self.native.reclaim(1):
            self.native.check()
        self.reclaiming = False

    def compare_stats(self):
        self.native.check()
        self.reference.check()
        ours, references = self.native.stats(), self.reference.stats()
        assert ours[1:-1] == references[1:-1]
        assert ours.nodes == references.nodes or (self.reclaiming and ours.nodes > references.nodes)


class RadixMachine(BothTrees):
    """Both trees do the same; with room for everything, they equal the model exactly."""

    stored = Bundle("stored")

    @initialize(pairs_max=st.none() | st.integers(1, 30))
    def start(self, pairs_max):
        self.begin(pairs_max)
        self.copies: Counter[tuple[int, int, Tier]] = Counter()
        self.sources: dict[int, set[int]] = {}

    @rule(target=stored, slot=SLOTS, node=NODES, skip=st.integers(0, 3), tier=TIERS)
    def store(self, slot, node, skip, tier):
        path = chain_to(node)
        skip = min(skip, len(path) - 1)
        if self.bounded:
            self.reclaim_all()  # so that both evict the same
        for tree in (self.native, self.reference):
            tree.store(slot, array(path[skip:]), path[skip - 1] if skip else None, tier)
        self.copies.update((slot, h, tier) for h in path[skip:])
        return slot, path[skip:], tier

    @rule(target=stored, slot=SLOTS, node=NODES)
    def store_on_the_device(self, slot, node):
        return self.store(slot, node, 0, Tier.DEVICE)

    @rule(stored=stored, backwards=st.booleans())
    def remove_what_was_stored(self, stored, backwards):
        slot, hashes, tier = stored
        self.remove(slot, hashes[::-1] if backwards else hashes, tier)

    @rule(slot=SLOTS, node=NODES, tier=TIERS)
    def remove_one(self, slot, node, tier):
        self.remove(slot, [node], tier)

    def remove(self, slot, hashes, tier):
        for tree in (self.native, self.reference):
            tree.remove(slot, array(hashes).tobytes(), tier=tier)
        for h in hashes:
            if self.copies[slot, h, tier]:
                self.copies[slot, h, tier] -= 1

    @rule(slot=SLOTS)
    def clear(self, slot):
        for tree in (self.native, self.reference):
            tree.clear(slot)
        self.reclaiming = True
        for key in [key for key in self.copies if key[0] == slot]:
            del self.copies[key]

    @rule(slot=SLOTS, sources=st.sets(SLOTS, max_size=2))
    def share(self, slot, sources):
        shared = set().union(*self.sources.values())
        is_both = sources and (slot in shared | sources or sources & self.sources.keys())
        for tree in (self.native, self.reference):
            if is_both:
                with pytest.raises(ValueError, match="not both"):
                    tree.share(slot, [*sources])
            else:
                tree.share(slot, [*sources])
        if not is_both:
            self.sources.pop(slot, None)
            self.sources.update({slot: sources} if sources else {})

    @rule(pairs_max=st.integers(1, 40))
    def allow(self, pairs_max):
        for tree in (self.native, self.reference):
            tree.allow(pairs_max)

    @rule(blocks=st.integers(1, 20))
    def reclaim(self, blocks):
        self.reclaiming = self.native.reclaim(blocks)

    @rule(node=NODES, skip=st.integers(0, 2), beyond=st.lists(UNKNOWN, max_size=2))
    def match(self, node, skip, beyond):
        path = (chain_to(node) + beyond)[skip:]
        ours, references = self.native.match(array(path)), self.reference.match(array(path))
        self.compare(ours, references)
        self.compare_to_model(path, ours)

    @rule(nodes=st.lists(NODES, max_size=5))
    def match_many(self, nodes):
        paths = [chain_to(node) for node in nodes]
        queries = [array(path) for path in paths]
        ours, references = (
            self.native.match_many(queries),
            self.reference.match_many([q.tobytes() for q in queries]),
        )
        self.compare(ours, references)

    def compare(self, ours, references):
        np.testing.assert_array_equal(ours.depths, references.depths)
        np.testing.assert_array_equal(ours.tiers, references.tiers)
        assert (
            ours.tiers.dtype
            == references.tiers.dtype
            == ours.depths.dtype
            == references.depths.dtype
            == np.int32
        )

    def compare_to_model(self, path, match):
        held = {key for key, count in self.copies.items() if count}
        shared = set().union(*self.sources.values())
        for slot, depth in enumerate(match.depths.tolist()):
            if slot in shared:
                assert depth == 0
                continue
            loads = {slot} | self.sources.get(slot, set())
            best = [
                next((t for t in Tier if any((each, h, t) in held for each in loads)), None) for h in path
            ]
            expected = best.index(None) if None in best else len(best)
            assert depth <= expected
            if not self.bounded:
                assert depth == expected
                assert match.tiers[:, slot].tolist() == [best[:depth].count(tier) for tier in Tier]
        assert self.bounded or all(slot < len(match.depths) for slot, _, _ in held)

    @invariant()
    def agrees(self):
        self.compare_stats()
        assert contents(self.native) == contents(self.reference)
        for slot in range(self.reference.num_slots):
            assert self.native.held_blocks(slot) == self.reference.held_blocks(slot)
        if not self.bounded:
            copies = Counter()
            for (slot, h, _, tier), count in contents(self.reference).items():
                copies[slot, h, tier] += count
            assert copies == +self.copies


class NonsenseMachine(BothTrees):
    """Engines tell several parents of a block, in circles too."""

    HASHES = st.lists(st.integers(0, 6), max_size=5)
    PARENTS = st.none() | st.integers(0, 6)

    @initialize(pairs_max=st.none() | st.integers(1, 10))
    def start(self, pairs_max):
        self.begin(pairs_max)

    @rule(slot=st.integers(0, 3), hashes=HASHES, parent=PARENTS, tier=TIERS)
    def store(self, slot, hashes, parent, tier):
        if self.bounded:
            self.reclaim_all()
        for tree in (self.native, self.reference):
            tree.store(slot, array(hashes), parent, tier)

    @rule(slot=st.integers(0, 3), hashes=HASHES, tier=TIERS)
    def remove(self, slot, hashes, tier):
        for tree in (self.native, self.reference):
            tree.remove(slot, array(hashes), tier)

    @rule(slot=st.integers(0, 3))
    def clear(self, slot):
        for tree in (self.native, self.reference):
            tree.clear(slot)
        self.reclaiming = True

    @invariant()
    def agrees(self):
        self.compare_stats()
        # Where parents go in a circle, one of them comes first: compared are the copies.
        assert copies(self.native) == copies(self.reference)


def copies(tree) -> Counter[tuple[int, int, Tier]]:
    found = Counter()
    for worker, hashes, _, tier in tree.snapshot():
        found.update((worker, h, tier) for h in np.frombuffer(hashes, dtype=np.uint64).tolist())
    return found


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(stateful_step_count=40)
TestNonsenseMachine = NonsenseMachine.TestCase
TestNonsenseMachine.settings = settings(stateful_step_count=40)
