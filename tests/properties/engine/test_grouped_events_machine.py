"""What routers count of a hybrid model's prompts is what its engine could use, after any history of all groups' blocks."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored
from penstock.core.wire import pack_tokens
from penstock.engine.kv_events.events import EngineCleared, EngineRemoved, EngineStored
from penstock.engine.kv_events.translator import HexSalts, KvEventTranslator
from penstock.router.radix import RadixTree

SIZE = 2
LENGTH = 6
PROMPTS = [
    [*([1] * shared * SIZE), *range(20 * tail, 20 * tail + (LENGTH - shared) * SIZE)]
    for tail, shared in enumerate((6, 3, 0), 1)
]
FIRST = 1
"""The engine's number of the group that tells tokens."""
PROMPT = st.integers(0, len(PROMPTS) - 1)
SPAN = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)


class GroupedEventsMachine(RuleBasedStateMachine):
    @initialize(needed=st.dictionaries(st.sampled_from([0, 2]), st.one_of(st.none(), st.integers(0, 3))))
    def begin(self, needed):
        self.needed = needed
        self.held = {group: Counter() for group in (*needed, FIRST)}
        self.seen = {FIRST}
        self.batch = []
        self.omissions = Counter()
        self.translator = KvEventTranslator(block_size=SIZE, salt_of=HexSalts(), omissions=self.omissions)
        self.tree = RadixTree(10_000)

    def name(self, prompt, block):
        return int(block_hashes(PROMPTS[prompt][: (block + 1) * SIZE], SIZE)[-1, 1])  # an engine's own

    @rule(prompt=PROMPT, span=SPAN)
    def store(self, prompt, span):
        start, end = span
        if start and not self.held[FIRST][self.name(prompt, start - 1)]:
            return
        names = [self.name(prompt, block) for block in range(start, end)]
        parent = self.name(prompt, start - 1) if start else None
        self.held[FIRST].update(names)
        tokens = pack_tokens(PROMPTS[prompt][start * SIZE : end * SIZE])
        if names:
            self.batch.append(EngineStored(names, parent, tokens, SIZE))

    @rule(prompt=PROMPT, span=SPAN, group=st.sampled_from([0, 2]))
    def store_other(self, prompt, span, group):
        if group in self.needed:
            names = [self.name(prompt, block) for block in range(*span)]
            self.seen.add(group)
            self.held[group].update(names)
            self.batch.append(EngineStored(names, group=group, needed_blocks=self.needed[group]))

    @rule(prompt=PROMPT, block=st.integers(0, LENGTH - 1), group=st.sampled_from([0, FIRST, 2]))
    def remove(self, prompt, block, group):
        name = self.name(prompt, block)
        if group in self.held and self.held[group][name]:
            self.held[group][name] -= 1
            self.batch.append(EngineRemoved([name], group=None if group == FIRST else group))

    @rule()
    def clear(self):
        for held in self.held.values():
            held.clear()
        self.seen = {FIRST}  # groups are learnt anew
        self.batch.append(EngineCleared())

    @rule()
    def tell(self):
        events, self.batch = self.translator.translate(self.batch), []
        for event in events:
            match event:
                case BlockStored():
                    self.tree.store(0, event.block_hashes, event.parent_block_hash, event.tier)
                case BlockRemoved():
                    self.tree.remove(0, event.block_hashes, event.tier)
                case AllBlocksCleared():
                    self.tree.clear(0)
        self.translator.check()

    def is_usable(self, names):
        return all(self.held[FIRST][name] for name in names) and all(
            all(held[name] for name in names[len(names) - min(len(names), most) :])
            for group, held in self.held.items()
            if group in self.seen and group != FIRST
            for most in [LENGTH if self.needed[group] is None else self.needed[group]]
        )

    @invariant()
    def routers_count_what_can_be_used(self):
        if not hasattr(self, "tree") or self.batch:
            return
        paths = [[self.name(prompt, block) for block in range(LENGTH)] for prompt in range(len(PROMPTS))]
        usable = [
            path[: end + 1] for path in paths for end in range(LENGTH) if self.is_usable(path[: end + 1])
        ]
        for tokens, path in zip(PROMPTS, paths, strict=True):
            longest = max(
                (n for n in range(1, LENGTH + 1) if any(path[:n] == other[:n] for other in usable)), default=0
            )
            depths = self.tree.match_tokens(np.array(tokens, np.int32), SIZE).depths
            assert (int(depths[0]) if len(depths) else 0) == longest
        assert not self.tree.stats().unknown_removals
        assert not self.omissions


TestGroupedEvents = GroupedEventsMachine.TestCase
