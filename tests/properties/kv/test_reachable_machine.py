"""A prompt's leading blocks that are told are those of the longest prefix that leads to one that can be used."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kv.groups import ReachableBlocks

PARENTS = {1: None, 2: 1, 3: 2, 4: 3, 5: 4, 6: 2, 7: 6}
"""Two prompts that part after two blocks."""
BLOCKS = st.sampled_from(sorted(PARENTS))
NEEDED = st.one_of(st.none(), st.integers(0, 3))


def path(block):
    blocks = [block]
    while (parent := PARENTS[blocks[0]]) is not None:
        blocks.insert(0, parent)
    return blocks


class ReachableMachine(RuleBasedStateMachine):
    @initialize(needed=st.lists(NEEDED, max_size=3))
    def begin(self, needed):
        self.needed = needed
        self.blocks = ReachableBlocks(needed)
        self.stored: set[int] = set()
        self.others: list[set[int]] = [set() for _ in needed]
        self.told: set[int] = set()

    @rule(block=BLOCKS)
    def store_prefix(self, block):
        for each in path(block):
            self.store(each)

    @rule(block=BLOCKS)
    def store(self, block):
        self.stored.add(block)
        self.blocks.store(block, PARENTS[block])

    @rule(block=BLOCKS)
    def remove(self, block):
        self.stored.discard(block)
        self.blocks.remove(block)

    @rule(block=BLOCKS, group=st.integers(0, 2), length=st.integers(1, 4))
    def store_others(self, block, group, length):
        if self.needed:
            group %= len(self.needed)
            for each in path(block)[-length:]:
                self.others[group].add(each)
                self.blocks.store_other(group, each)

    @rule(block=BLOCKS, group=st.integers(0, 2))
    def remove_other(self, block, group):
        if self.needed:
            group %= len(self.needed)
            assert self.blocks.remove_other(group, block) == (block in self.others[group])
            self.others[group].discard(block)

    @rule(needed=NEEDED)
    def add_group(self, needed):
        if len(self.needed) < 3:
            self.needed = [*self.needed, needed]
            self.others.append(set())
            self.blocks.add_group(needed)

    @rule()
    def take(self):
        added, removed = self.blocks.take()
        for key, parent in added:
            assert key not in self.told
            assert parent == PARENTS[key]
            self.told.add(key)
        assert set(removed) <= self.told
        self.told -= set(removed)

    def is_usable(self, block):
        blocks = path(block)
        return set(blocks) <= self.stored and all(
            set(blocks if needed is None else blocks[len(blocks) - min(needed, len(blocks)) :]) <= held
            for needed, held in zip(self.needed, self.others, strict=True)
        )

    @invariant()
    def what_is_told_leads_on(self):
        if not hasattr(self, "blocks"):
            return
        self.take()
        usable = [path(block) for block in PARENTS if self.is_usable(block)]
        for block in PARENTS:
            blocks = path(block)
            leading = next((n for n, each in enumerate(blocks) if each not in self.told), len(blocks))
            longest = max(
                (n + 1 for n, each in enumerate(blocks) if any(each in other for other in usable)), default=0
            )
            assert leading == longest, (block, self.told)
        held = self.stored.union(*self.others)
        assert len(self.blocks) <= len({each for block in held for each in path(block)})


TestReachable = ReachableMachine.TestCase
