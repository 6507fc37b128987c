"""The prefix index against a model that counts copies in plain dictionaries."""

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.types import Tier
from penstock.router.radix import RadixTree

SLOTS = st.integers(0, 11)
TIERS = st.sampled_from(list(Tier))
# Chains of a small forest: hash h has parent h // 3 and roots are 1 and 2, so that prefixes are shared.
NODES = st.integers(1, 80)


def chain_to(node: int) -> list[int]:
    path = []
    while node:
        path.append(node)
        node //= 3
    return path[::-1]


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


class RadixMachine(RuleBasedStateMachine):
    """With room for everything, the tree equals the model exactly."""

    stored = Bundle("stored")

    @initialize()
    def start(self):
        self.tree = RadixTree(100_000)
        self.copies: Counter[tuple[int, int, Tier]] = Counter()

    @rule(target=stored, slot=SLOTS, node=NODES, skip=st.integers(0, 3), tier=TIERS)
    def store(self, slot, node, skip, tier):
        path = chain_to(node)
        skip = min(skip, len(path) - 1)
        self.tree.store(slot, array(path[skip:]), parent=path[skip - 1] if skip else None, tier=tier)
        self.copies.update((slot, h, tier) for h in path[skip:])
        return slot, path[skip:], tier

    @rule(stored=stored)
    def remove_what_was_stored(self, stored):
        self.remove(*stored)

    @rule(slot=SLOTS, node=NODES, tier=TIERS)
    def remove_one(self, slot, node, tier):
        self.remove(slot, [node], tier)

    def remove(self, slot, hashes, tier):
        self.tree.remove(slot, array(hashes), tier=tier)
        for h in hashes:
            if self.copies[slot, h, tier]:
                self.copies[slot, h, tier] -= 1

    @rule(slot=SLOTS)
    def clear(self, slot):
        self.tree.clear(slot)
        for key in [key for key in self.copies if key[0] == slot]:
            del self.copies[key]

    @rule(node=NODES, beyond=st.lists(NODES, max_size=2))
    def match(self, node, beyond):
        path = chain_to(node) + beyond
        held = {(slot, h) for (slot, h, _), count in self.copies.items() if count}
        depths = self.tree.match(array(path)).tolist()
        for slot, depth in enumerate(depths):
            expected = next((i for i, h in enumerate(path) if (slot, h) not in held), len(path))
            assert depth == expected
        assert all(slot < len(depths) for slot, _ in held)

    @invariant()
    def agrees(self):
        self.tree.check()
        held = {(slot, h) for (slot, h, _), count in self.copies.items() if count}
        assert self.tree.stats().pairs == len(held)
        for slot in range(self.tree.num_slots):
            assert self.tree.held_blocks(slot) == sum(s == slot for s, _ in held)


class SmallRadixMachine(RuleBasedStateMachine):
    """With little room, the bound holds, and the tree never claims what the model does not hold."""

    @initialize(pairs_max=st.integers(1, 30))
    def start(self, pairs_max):
        self.tree = RadixTree(pairs_max)
        self.copies: Counter[tuple[int, int]] = Counter()

    @rule(slot=SLOTS, node=NODES)
    def store(self, slot, node):
        path = chain_to(node)
        self.tree.store(slot, array(path))
        self.copies.update((slot, h) for h in path)

    @rule(slot=SLOTS, node=NODES)
    def remove(self, slot, node):
        self.tree.remove(slot, array([node]))
        if self.copies[slot, node]:
            self.copies[slot, node] -= 1

    @rule(slot=SLOTS)
    def clear(self, slot):
        self.tree.clear(slot)
        for key in [key for key in self.copies if key[0] == slot]:
            del self.copies[key]

    @rule(node=NODES)
    def match(self, node):
        path = chain_to(node)
        for slot, depth in enumerate(self.tree.match(array(path)).tolist()):
            assert all(self.copies[slot, h] for h in path[:depth])

    @invariant()
    def is_bounded(self):
        self.tree.check()


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=60, stateful_step_count=40)
TestSmallRadixMachine = SmallRadixMachine.TestCase
TestSmallRadixMachine.settings = settings(max_examples=60, stateful_step_count=40)
