"""Plans of loads equal those of a search through all lengths, whatever the tiers hold of which group of layers."""

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from penstock.core.wire import pack_hashes
from penstock.kv.connector.mirror import TierMirror
from penstock.kv.connector.plans import Planner
from penstock.kv.groups import GroupKind, KvGroup, KvGroups

SIZE = 4
LENGTH = 7
PROMPTS = [
    np.array([*([1] * shared * SIZE), *range(10 * tail, 10 * tail + (LENGTH - shared) * SIZE)], np.int32)
    for tail, shared in enumerate((7, 3, 3, 0))
]
TIERS = [Tier.HOST, Tier.DISK]
WHOLE = st.sampled_from([GroupKind.FULL, GroupKind.MLA]).map(lambda kind: KvGroup(kind, (), 1))
WINDOWS = st.integers(1, 5 * SIZE).map(lambda tokens: KvGroup(GroupKind.SLIDING_WINDOW, (), 1, tokens))


def needs(group: KvGroup, end: int) -> set[int]:
    """Find the blocks with a token that the first token after a prefix of `end` blocks attends to."""
    begin = 0 if group.window_tokens is None else max(0, end * SIZE + 1 - group.window_tokens)
    return {token // SIZE for token in range(begin, end * SIZE)}


class KvGroupsMachine(RuleBasedStateMachine):
    @initialize(groups=st.tuples(WHOLE, st.lists(st.one_of(WHOLE, WINDOWS), max_size=3)), order=st.randoms())
    def begin(self, groups, order):
        self.groups = [groups[0], *groups[1]]
        order.shuffle(self.groups)
        self.tables = KvGroups(self.groups, SIZE)
        self.mirror = TierMirror(1)
        self.planner = Planner(self.tables, self.mirror, SIZE)
        self.hashes = [block_hashes(tokens, SIZE) for tokens in PROMPTS]
        self.held: dict[Tier, set[tuple[int, bytes]]] = {tier: set() for tier in TIERS}

    def name(self, group, block_hash):
        (place,) = (place for place in self.tables.places if place.group == group)
        return place.names(block_hash)

    @rule(
        tier=st.sampled_from(TIERS),
        prompt=st.integers(0, len(PROMPTS) - 1),
        group=st.integers(0, 3),
        span=st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)),
        is_stored=st.booleans(),
    )
    def change(self, tier, prompt, group, span, is_stored):
        group %= len(self.groups)
        hashes = self.hashes[prompt][min(span) : max(span)]
        if not len(hashes):
            return
        names = pack_hashes(np.ascontiguousarray(self.name(group, hashes)[:, 0]))
        keys = {(group, each.tobytes()) for each in hashes}
        if is_stored:
            self.held[tier] |= keys
            event = BlockStored(block_hashes=names, parent_block_hash=None, block_size=SIZE, tier=tier)
        else:
            self.held[tier] -= keys
            event = BlockRemoved(block_hashes=names, tier=tier)
        self.mirror.apply(0, [event])

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        tier=st.sampled_from(TIERS),
        ends=st.sets(st.integers(1, LENGTH)),
    )
    def offload(self, prompt, tier, ends):
        """Store what a request leaves: all of groups over the whole context, and windows at some lengths."""
        for number, group in enumerate(self.groups):
            blocks = set().union(*(needs(group, end) for end in ends))
            for block in blocks:
                self.change(tier, prompt, number, (block, block + 1), is_stored=True)

    @rule()
    def clear(self):
        self.held = {tier: set() for tier in TIERS}
        self.mirror.apply(0, [AllBlocksCleared()])

    def has(self, group, block_hash, tiers):
        return any((group, block_hash.tobytes()) in self.held[tier] for tier in tiers)

    @invariant()
    def plans_are_the_longest(self):
        if not hasattr(self, "planner"):
            return
        for prompt in range(len(PROMPTS)):
            for num_before in (0, 2):
                for tiers in (TIERS, TIERS[1:]):
                    self.check(self.hashes[prompt], num_before, tiers)

    def check(self, hashes, num_before, tiers):
        def is_held(end):
            return all(
                self.has(number, hashes[block], tiers)
                for number, group in enumerate(self.groups)
                for block in needs(group, end)
                if block >= num_before
            )

        longest = max(end for end in range(num_before, LENGTH + 1) if end == num_before or is_held(end))
        plan = self.planner.plan(hashes, num_before, tiers)
        assert plan.num_blocks == longest - num_before
        assert plan.num_found >= plan.num_blocks
        ids = [[100 * number + block for block in range(LENGTH)] for number in range(len(self.groups))]
        expected = {
            100 * number + block: self.name(number, hashes[block]).tobytes()
            for number, group in enumerate(self.groups)
            for block in needs(group, longest)
            if block >= num_before
        }
        targets = self.planner.targets(plan, ids)
        assert dict(zip(targets, (each.tobytes() for each in plan.block_hashes), strict=True)) == expected
        assert sum(run.num_tokens for run in plan.runs) == plan.num_blocks * SIZE
        at = 0
        for run in plan.runs:
            assert run.start == at
            at = run.end
            names = {each.tobytes() for each in plan.block_hashes[run.start : run.end]}
            kept = {
                self.name(group, np.frombuffer(key, np.uint64)).tobytes()
                for group, key in self.held[run.tier]
            }
            assert run.tier in tiers
            assert names <= kept
        assert at == len(plan.block_hashes)


TestKvGroups = KvGroupsMachine.TestCase
