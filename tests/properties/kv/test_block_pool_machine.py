"""The block pool against a model that keeps whole prefixes in plain dicts and lists."""

import math
from contextlib import contextmanager

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored
from penstock.core.wire import unpack_hashes
from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.use import BlockUse

NUM_BLOCKS = 6
BLOCK_SIZE = 2
# a block's content is one letter; equal texts are equal prefixes. Few texts, so that sequences often share them
texts = st.sampled_from(["ab", "abba", "b"])


def hashes_of(text):
    tokens = np.repeat(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32), BLOCK_SIZE)
    return block_hashes(tokens, BLOCK_SIZE)


class Sequence:
    """A sequence under way: `block_ids[:committed]` are published."""

    def __init__(self, text, block_ids, committed):
        self.text = text
        self.block_ids = block_ids
        self.committed = committed


class BlockPoolMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")
    eviction = "lru"
    tenant_share = 1.0
    in_python = False

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(
            NUM_BLOCKS,
            BLOCK_SIZE,
            self.eviction,
            tenant_share=self.tenant_share,
            in_python=self.in_python,
        )
        self.live = []  # model: every sequence that holds blocks
        self.cache = {}  # model: prefix text -> block id
        self.unused_since = {}  # model: prefix text -> when it became idle
        self.clock = 0
        self.parents = {}  # low64 of every block ever committed -> low64 of its parent
        self.replayed = set()  # what a subscriber to the events knows

    # ---- the model ------------------------------------------------------------------------------------
    def held(self):
        counts = {}
        for sequence in self.live:
            for block_id in sequence.block_ids:
                counts[block_id] = counts.get(block_id, 0) + 1
        return counts

    def idle(self):
        held = self.held()
        return [prefix for prefix, block_id in self.cache.items() if block_id not in held]

    def available(self):
        return NUM_BLOCKS - len(self.held())

    def expect_allocated(self, count):
        """Evict in the model what the pool must evict for `count` blocks: longest unused first, tails first."""
        idle = sorted(self.idle(), key=self.unused_since.__getitem__)
        free = self.available() - len(idle)
        for prefix in idle[: max(0, count - free)]:
            del self.cache[prefix]

    # ---- rules ----------------------------------------------------------------------------------------
    @rule(target=sequences, text=texts)
    def admit(self, text):
        hashes = hashes_of(text)
        matched = self.pool.match(hashes)
        expected = []
        for end in range(1, len(text) + 1):
            if text[:end] not in self.cache:
                break
            expected.append(self.cache[text[:end]])
        assert matched == expected
        idle_hits = self.pool.count_idle(matched)
        assert idle_hits == len(set(matched) - set(self.held()))
        if len(text) - len(matched) > self.pool.num_available - idle_hits:
            return multiple()
        self.pool.acquire(matched)
        sequence = Sequence(text, list(matched), len(matched))
        self.live.append(sequence)
        self.grow(sequence, len(text) - len(matched))
        return sequence

    def grow(self, sequence, count):
        fits = count <= self.available()
        if fits:
            self.expect_allocated(count)
        taken = self.pool.allocate(count)
        assert (taken is not None) == fits
        if taken is not None:
            assert len(set(taken)) == count
            assert set(taken).isdisjoint(self.held())
            sequence.block_ids += taken
        return fits

    @rule(sequence=sequences, letter=st.sampled_from("ab"))
    def append(self, sequence, letter):
        if sequence.block_ids and self.grow(sequence, 1):
            sequence.text += letter

    @rule(sequence=sequences, count=st.integers(1, 5))
    def commit(self, sequence, count):
        start = sequence.committed
        end = min(start + count, len(sequence.block_ids))
        hashes = hashes_of(sequence.text)
        parent = int(hashes[start - 1, 0]) if start else None
        self.pool.commit(sequence.block_ids[start:end], hashes[start:end], parent)
        for index in range(start, end):
            self.parents[int(hashes[index, 0])] = int(hashes[index - 1, 0]) if index else None
            self.cache.setdefault(sequence.text[: index + 1], sequence.block_ids[index])
        sequence.committed = max(start, end)

    @rule(
        sequence=consumes(sequences),
        use=st.none()
        | st.builds(
            BlockUse, priority=st.integers(-1, 1), until_s=st.just(math.inf), tenant=st.integers(0, 2)
        ),
    )
    def release(self, sequence, use):
        self.pool.release(sequence.block_ids, use)
        self.live.remove(sequence)
        for end in range(len(sequence.text), 0, -1):
            prefix = sequence.text[:end]
            held = self.held()
            if self.cache.get(prefix) == sequence.block_ids[end - 1] and self.cache[prefix] not in held:
                self.clock += 1
                self.unused_since[prefix] = self.clock

    @contextmanager
    def evicting(self):
        """`expect_allocated` took from the model what the pool has to evict."""
        yield

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def make_room(self, count):
        before, parents = dict(self.cache), []
        with self.evicting():
            if count <= self.available():
                self.expect_allocated(count)
            chains = self.pool.make_room(count)
        gone = {prefix: block_id for prefix, block_id in before.items() if prefix not in self.cache}
        told = {}
        for chain in chains:
            names = [tuple(row) for row in chain.block_hashes.tolist()]
            told.update(zip(names, chain.block_ids, strict=True))
            parents += zip(names, [chain.parent, *(low for low, _ in names)], strict=False)
        assert told == {tuple(hashes_of(prefix)[-1].tolist()): block for prefix, block in gone.items()}
        assert all(self.parents[low] == parent for (low, _), parent in parents)
        assert count > self.available() or self.pool.num_available - len(self.idle()) >= count

    @rule()
    def reset(self):
        self.pool.reset()
        self.cache.clear()
        for sequence in self.live:  # the rest of them would be orphans: legal, but the model need not follow
            sequence.committed = len(sequence.block_ids)

    # ---- invariants -----------------------------------------------------------------------------------
    @invariant()
    def state_is_sound(self):
        self.pool.check()
        assert self.pool.num_active == len(self.held())
        assert self.pool.num_available == self.available()
        names = {tuple(hashes_of(prefix)[-1].tolist()) for prefix in self.cache}
        assert {tuple(row) for row in self.pool.resident_hashes().tolist()} == names
        assert self.pool.num_cached == len(names)

    @rule()
    def read_events(self):
        for event in self.pool.take_events():
            match event:
                case BlockStored(block_hashes=packed, parent_block_hash=parent):
                    for low64 in unpack_hashes(packed).tolist():
                        assert low64 not in self.replayed, "stored twice"
                        assert self.parents[low64] == parent
                        self.replayed.add(low64)
                        parent = low64
                case BlockRemoved(block_hashes=packed):
                    hashes = set(unpack_hashes(packed).tolist())
                    assert hashes <= self.replayed, "removed but never stored"
                    self.replayed -= hashes
                case AllBlocksCleared():
                    self.replayed.clear()
        assert self.replayed == {int(row[0]) for row in self.pool.resident_hashes()}

    def teardown(self):
        self.read_events()


class KeyedMachine(BlockPoolMachine):
    """With `seconds` the model lets the pool choose, but an idle child goes before its parent."""

    eviction = "seconds"

    def expect_allocated(self, count):
        self.idle_before = set(self.idle())
        self.num_to_evict = max(0, count - (self.available() - len(self.idle_before)))

    @contextmanager
    def evicting(self):
        """Take from the model what the pool evicted."""
        self.idle_before, self.num_to_evict = set(), 0
        yield
        resident = {tuple(row) for row in self.pool.resident_hashes().tolist()}
        gone = {prefix for prefix in self.cache if tuple(hashes_of(prefix)[-1].tolist()) not in resident}
        assert gone <= self.idle_before, "a pinned block was evicted"
        assert len(gone) == self.num_to_evict
        for prefix in self.idle_before - gone:
            assert prefix[:-1] not in gone, "a parent was evicted before its child"
        for prefix in gone:
            del self.cache[prefix]

    def grow(self, sequence, count):
        with self.evicting():
            return super().grow(sequence, count)


BlockPoolMachine.TestCase.settings = settings(
    max_examples=2 * settings.default.max_examples, stateful_step_count=50
)


def other(machine, **fields):
    """Make a machine of another policy, or of the reference: tests/native runs that step by step beside the native pool."""
    case = type("Other", (machine,), fields).TestCase
    case.settings = settings(stateful_step_count=50)
    return case


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestTwinMachine = other(BlockPoolMachine, in_python=True)
TestSecondsMachine = other(KeyedMachine)
TestTenantMachine = other(KeyedMachine, tenant_share=0.3)
