"""What a router's index counts of a prompt, against what a worker with several groups of layers would load.

The index never counts less. It counts more only of a prompt that parts from another one between two kept windows.
"""

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Holder, Tier
from penstock.core.wire import pack_hashes
from penstock.kv.connector.mirror import TierMirror
from penstock.kv.connector.plans import Planner
from penstock.kv.groups import GroupEvents, GroupKind, KvGroup, KvGroups
from penstock.router.radix import RadixTree

SIZE = 4
LENGTH = 7
PROMPTS = [
    block_hashes(
        np.array([*([1] * shared * SIZE), *range(10 * tail, 10 * tail + (LENGTH - shared) * SIZE)], np.int32),
        SIZE,
    )
    for tail, shared in enumerate((7, 4, 2, 0))
]
NUMBERS = st.integers(0, len(PROMPTS) - 1)
TIERS = [Tier.HOST, Tier.OBJECT]
WHOLE = st.sampled_from([GroupKind.FULL, GroupKind.MLA]).map(lambda kind: KvGroup(kind, (), 1))
WINDOWS = st.integers(1, 4 * SIZE).map(lambda tokens: KvGroup(GroupKind.SLIDING_WINDOW, (), 1, tokens))


class ForeseenMachine(RuleBasedStateMachine):
    @initialize(groups=st.tuples(WHOLE, st.lists(st.one_of(WHOLE, WINDOWS), min_size=1, max_size=3)))
    def begin(self, groups):
        self.tables = KvGroups([groups[0], *groups[1]], SIZE)
        self.mirror = TierMirror(1)
        self.mirror.shared = {Tier.OBJECT: Holder.FLEET}
        self.planner = Planner(self.tables, self.mirror, SIZE)
        self.told = GroupEvents(self.tables, SIZE)
        self.index = RadixTree(1000)
        self.slots = {tier: slot for slot, tier in enumerate(TIERS)}
        self.held: dict[Tier, dict[int, None]] = {tier: {} for tier in TIERS}

    def tell(self, event):
        for told in self.told.translate(self.mirror.apply(0, [event])):
            match told:
                case BlockStored():
                    self.index.store(
                        self.slots[told.tier], told.block_hashes, told.parent_block_hash, told.tier
                    )
                case BlockRemoved():
                    self.index.remove(self.slots[told.tier], told.block_hashes, told.tier)
                case AllBlocksCleared():
                    assert told.holder is Holder.FLEET
                    self.index.clear(self.slots[Tier.OBJECT])

    def store(self, tier, names, parent):
        """Store what a tier lacks of a chain, as one event for each run."""
        for name in names[:, 0].tolist():
            if name not in self.held[tier]:
                self.held[tier][name] = None
                self.tell(
                    BlockStored(
                        block_hashes=pack_hashes([name]), parent_block_hash=parent, block_size=SIZE, tier=tier
                    )
                )
            parent = name

    @rule(number=NUMBERS, tier=st.sampled_from(TIERS), ends=st.sets(st.integers(1, LENGTH), max_size=2))
    def offload(self, number, tier, ends):
        """Store what a request leaves: all of groups over the whole context, and windows at some lengths."""
        hashes = PROMPTS[number]
        self.store(tier, hashes, None)
        for end in sorted(ends):
            for position in range(end):
                last = max(
                    (n for n, place in enumerate(self.tables.others, 1) if place.start(end) <= position),
                    default=0,
                )
                places = self.tables.others[:last]
                block_hash = hashes[position : position + 1]
                self.store(tier, self.tables.chain(block_hash, places)[1:], int(block_hash[0, 0]))

    @rule(tier=st.sampled_from(TIERS), draws=st.lists(st.integers(0, 1000), min_size=1, max_size=4))
    def evict(self, tier, draws):
        gone = set()
        for draw in draws:
            names = [name for name in self.held[tier] if name not in gone]
            if names:
                gone.add(names[draw % len(names)])
        if gone:
            for name in gone:
                del self.held[tier][name]
            self.tell(BlockRemoved(block_hashes=pack_hashes(sorted(gone)), tier=tier))

    @rule()
    def clear(self):
        self.held = {tier: {} for tier in TIERS}
        self.tell(AllBlocksCleared())

    def counted(self, tier, hashes):
        depths = self.index.match(np.ascontiguousarray(hashes[:, 0])).depths
        slot = self.slots[tier]
        return int(depths[slot]) if slot < len(depths) else 0

    @invariant()
    def the_index_counts_what_is_loaded_or_what_leads_on(self):
        if not hasattr(self, "index"):
            return
        for tier in TIERS:
            plans = [self.planner.plan(hashes, 0, [tier]).num_blocks for hashes in PROMPTS]
            counts = [self.counted(tier, hashes) for hashes in PROMPTS]
            for hashes, plan, count in zip(PROMPTS, plans, counts, strict=True):
                assert count >= plan
                others = [
                    other_plan
                    for other, other_plan in zip(PROMPTS, plans, strict=True)
                    if (other[:count] == hashes[:count]).all()
                ]
                assert max(others) >= count, "a block that is told leads to a prefix that can be loaded"
                if len(others) == 1:
                    assert count == plan, "where no other prompt goes on from here the index is exact"
        stats = self.index.stats()
        assert not stats.unknown_removals
        assert not stats.contradictions


TestForeseen = ForeseenMachine.TestCase
