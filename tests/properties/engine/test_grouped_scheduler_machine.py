"""The scheduler of a model whose groups of layers have block tables of their own: the same random life, without and with a KV tier.

Each group's KV of each token is written and read where its table says. So a block that was freed, shared or overwritten while
some token still attends to it shows as KV of another prefix, or of another group.
"""

from dataclasses import replace

import msgspec.structs
import numpy as np
import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from penstock.core.hashing import block_hashes
from penstock.core.types.events import BlockRemoved, BlockStored, Tier
from penstock.core.types.requests import SamplingParams
from penstock.core.wire import pack_hashes
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.kv.groups import GroupKind, KvGroup, KvGroups, Windows
from penstock.kv.manager import KvManager
from penstock.kv.windows import WindowPrefixes
from penstock.seams.kv import KvNames
from tests.properties.engine.test_scheduler_machine import (
    BLOCK_SIZE,
    EOS,
    LIMITS,
    LONG_LIVES,
    NUM_BLOCKS,
    VOCAB,
    SchedulerMachine,
    check_that_a_bug_is_found,
    configs,
)
from tests.properties.engine.test_tiered_scheduler_machine import CellTier, TieredSchedulerMachine, Timers

all_windows = st.sampled_from([(6,), (9, 5), (1,), (30,), (4, 4), (17, 2)])


def grouped(windows):
    whole = KvGroup(GroupKind.FULL, (), 1)
    others = [KvGroup(GroupKind.SLIDING_WINDOW, (), 1, window) for window in windows]
    return KvGroups([whole, *others], BLOCK_SIZE)


class Grouped:
    """Limits, cells and checks of groups with a window, in place of windows that are only counted."""

    def set_groups(self, windows, config):
        self.sizes, self.groups = windows, grouped(windows)
        held = Windows(tuple((size, windows.count(size)) for size in sorted(set(windows))), 1)
        self.of_one = held.blocks(LIMITS.kv_tokens, config.prompt_budget, BLOCK_SIZE)
        self.limits = replace(LIMITS, windows=held, groups=self.groups)
        self.reused = 0
        return self.make_pool(NUM_BLOCKS + self.of_one)

    def use_windows(self, slot, start, end):
        table = self.scheduler.table
        known = table.token_ids[slot, :end].tolist()
        for group, window in enumerate(self.sizes):

            def place(position, group=group):
                block_id = int(table.window_tables[group, slot, position // BLOCK_SIZE])
                return block_id, position % BLOCK_SIZE

            for position in range(start, end):
                self.cells[place(position)] = hash((group, *known[: position + 1]))
            for position in range(max(0, start - window + 1), end):
                expected = hash((group, *known[: position + 1]))
                assert self.cells[place(position)] == expected, "KV of another prefix or group"
        self.reused += start > 0

    def give(self, request, known, block_id):
        """Without KV transfers nobody gives blocks."""
        self.scheduler.pins.unpin([block_id])

    def claim_partial_block(self, ended, reason):
        """Without KV transfers nobody claims blocks."""

    @rule(
        family=st.integers(0, 3), length=st.integers(1, 7), came=st.integers(0, 30), chunk=st.integers(1, 9)
    )
    def receive(self, family, length, came, chunk):
        """Publish the blocks of a prompt that another worker sends, as far as they come, by chunks; they stay pinned for a while."""
        prompt = [(family + 7 * index) % VOCAB for index in range(length * BLOCK_SIZE)]
        hashes = block_hashes(prompt, BLOCK_SIZE)
        names = self.scheduler._prefixes.windows.moved(hashes)
        here = self.scheduler.pins.pin_named(names.hashes)
        reserved = self.scheduler.reserve(len(names.hashes) - len(here))
        if reserved is None:
            self.scheduler.pins.unpin(here)
            return
        self.parents.update(zip(hashes[:, 0].tolist(), [None, *hashes[:, 0].tolist()], strict=False))
        self.highs.update((low, (low, high)) for low, high in hashes.tolist())
        places = self.places(hashes)
        end = min(len(here) + came, len(names.hashes))
        for first in range(len(here), end, chunk):
            last = min(first + chunk, end)
            for begin, stop, parent in names.chains(first, last):
                block_ids = reserved[begin - len(here) : stop - len(here)]
                for block_id, name in zip(block_ids, names.hashes[begin:stop].tolist(), strict=True):
                    group, position = places[tuple(name)]
                    for token in range(BLOCK_SIZE):
                        known = prompt[: position * BLOCK_SIZE + token + 1]
                        self.cells[block_id, token] = hash(tuple(known) if group is None else (group, *known))
                self.scheduler.pins.publish(block_ids, names.hashes[begin:stop], parent)
        self.hold(here)
        self.hold(reserved[: max(end - len(here), 0)])
        self.scheduler.pins.unpin(reserved[max(end - len(here), 0) :])
        if end == len(names.hashes):
            event("received a prompt")
            longest = self.scheduler._prefixes.windows.longest(
                hashes, len(self.scheduler._pool.match(hashes))
            )
            assert longest == length, "all that a request needs has come"

    def places(self, hashes):
        """Map each block's name to its group, None for the first one, and its position."""
        found = {tuple(each): (None, position) for position, each in enumerate(hashes.tolist())}
        for group, place in enumerate(self.groups.others):
            found |= {
                tuple(each): (group, position) for position, each in enumerate(place.names(hashes).tolist())
            }
        return found

    def read(self, step):
        if step is not None:
            device = tuple(each for each in step.events if each.tier is Tier.DEVICE)
            step = msgspec.structs.replace(step, events=device)
        super().read(step)

    @invariant()
    def routers_hear_of_usable_prefixes(self):
        """What was told of the device are blocks that lead to one where each group holds the window that ends there.

        Each one is told that a request can begin with. Behind a block that the first group lacks, some may not be.
        """
        if self.plan is not None or not hasattr(self, "groups"):
            return
        self.read(self.scheduler.take_step())
        held = {tuple(each) for each in self.scheduler._pool.resident_hashes().tolist()}
        usable, reached = set(), set()
        for low in [low for low, _ in held if low in self.parents]:
            chain = [low]
            while (parent := self.parents[chain[0]]) is not None:
                chain.insert(0, parent)
            names = [self.highs[each] for each in chain]
            if all(
                tuple((np.array(each, np.uint64) ^ place.mask).tolist()) in held
                for place in self.groups.others
                for each in names[place.start(len(names)) :]
            ):
                first = len(chain)
                while first and self.highs[chain[first - 1]] in held:
                    first -= 1
                usable.update(chain[first:])
                if not first:
                    reached.update(chain)
        assert reached <= self.resident <= usable

    def compute(self, plan):
        table = self.scheduler.table
        for row, slot in enumerate(plan.slots.tolist()):
            end = int(table.num_computed[slot] + plan.num_new[row])
            rows = block_hashes(table.token_ids[slot, :end], BLOCK_SIZE).tolist()
            self.highs.update((low, (low, high)) for low, high in rows)
        return super().compute(plan)

    def check_told(self, cached_blocks):
        assert len(self.resident) <= cached_blocks
        event("reused a prefix" if self.scheduler.load().prefix_hit_tokens else "reused none")

    def check_memory(self):
        """A running request holds no more than its tokens and the arithmetic of its windows."""
        slots = self.scheduler._slots
        for slot in slots.running:
            held = slots.tables.num_blocks(slot) + len(slots.tables._rows[slot].spare)
            assert held <= self.of_one, "more blocks than the windows of the longest request take"


class GroupedSchedulerMachine(Grouped, SchedulerMachine):
    @initialize(config=configs, windows=all_windows)
    def start(self, config, windows):
        self.config, self.highs = config, {}
        pool = self.set_groups(windows, config)
        self.scheduler = Scheduler(pool, self.limits, config, eos_token_ids=[EOS])
        self.scheduler.partial_blocks.keeps_any = False

    @invariant()
    def memory_is_bounded(self):
        if self.plan is None and hasattr(self, "groups"):
            self.check_memory()


class TellingTier(CellTier):
    """Tells what it keeps."""

    num_blocks = 60

    def __init__(self, cells):
        super().__init__(cells)
        self.events = []
        self.parents = {}

    def offload(self, block_hashes, block_ids, done):
        lows = block_hashes[:, 0].tolist()
        self.parents.update(zip(lows, [None, *lows], strict=False))
        return super().offload(block_hashes, block_ids, done)

    def end_offload(self, number):
        before = set(self.kept)
        super().end_offload(number)
        for low, _ in [key for key in self.kept if key not in before]:
            packed = pack_hashes([low])
            self.events.append(
                BlockStored(
                    block_hashes=packed,
                    parent_block_hash=self.parents[low],
                    block_size=BLOCK_SIZE,
                    tier=Tier.HOST,
                )
            )
        for low, _ in before - set(self.kept):
            self.events.append(BlockRemoved(block_hashes=pack_hashes([low]), tier=Tier.HOST))

    def take_events(self):
        events, self.events = tuple(self.events), []
        return events


class GroupedTieredMachine(Grouped, TieredSchedulerMachine):
    @initialize(
        config=configs,
        windows=all_windows,
    )
    def start(self, config, windows):
        self.config, self.highs = config, {}
        pool = self.set_groups(windows, config)
        self.tier = TellingTier(self.cells)
        self.timers, self.stepped = Timers(), {}
        self.kv = KvManager(pool, [self.tier], lambda: None, clock=self.timers, groups=self.groups)
        self.scheduler = Scheduler(pool, self.limits, config, eos_token_ids=[EOS], kv=self.kv)
        self.scheduler.partial_blocks.keeps_any = False

    @precondition(lambda self: self.plan is None)
    @rule()
    def move_down(self):
        """Let offloads end, and the device forget what nobody uses."""
        for _ in range(3):
            self.end_offloads()
            self.read(self.scheduler.take_step())
        pool = self.scheduler._pool
        pool.make_room(pool.num_available)

    @invariant()
    def the_longest_prefix_is_chosen(self):
        """Equal to a search through all lengths, over what the device has, and from its first gap on the tier."""
        if self.plan is not None or not hasattr(self, "kv"):
            return
        device = {tuple(each) for each in self.scheduler._pool.resident_hashes().tolist()}
        both = device | set(self.tier.kept)
        prompt = [7 * index % VOCAB for index in range(36)]
        hashes = block_hashes(prompt, BLOCK_SIZE)[:8]

        def needed(end, first=0):
            names = [tuple(each) for each in hashes[first:end].tolist()]
            for place in self.groups.others:
                names += [tuple(each) for each in place.names(hashes[place.start(end) : end]).tolist()]
            return names

        num_hits = len(self.scheduler._pool.match(hashes))
        here = max(end for end in range(num_hits + 1) if device.issuperset(needed(end)))
        kept = set(self.tier.kept)
        found = max(
            end for end in range(num_hits, 9) if kept.issuperset(map(tuple, hashes[num_hits:end].tolist()))
        )
        there = max(end for end in range(found + 1) if both.issuperset(needed(end)))
        is_whole = kept.issuperset(needed(there, min(num_hits, there)))
        chosen = self.kv.choose_prefix(hashes, num_hits, 36)
        assert chosen.end == (there if is_whole else here)
        assert bool(chosen.runs) == (chosen.end > here)


for machine in (GroupedSchedulerMachine, GroupedTieredMachine):
    machine.TestCase.settings = LONG_LIVES
TestGroupedSchedulerMachine = GroupedSchedulerMachine.TestCase
TestGroupedTieredMachine = GroupedTieredMachine.TestCase


def test_blocks_behind_one_that_was_evicted_are_told_once_a_request_can_begin_with_them():
    """A request whose blocks were cached already when it computed them leaves a gap where the cached ones are evicted."""
    machine = GroupedSchedulerMachine()

    def submit(length, families=1, moved=0, max_tokens=1):
        machine.submit(
            families, length, SamplingParams(max_tokens=max_tokens), moved, prefill_only=False, has_tail=False
        )

    hashes = block_hashes([7 * index % VOCAB for index in range(24)], BLOCK_SIZE)

    def told():
        machine.routers_hear_of_usable_prefixes()
        return [low in machine.resident for low in hashes[:, 0].tolist()]

    machine.start(SchedulerConfig(max_batch_tokens=10, max_running_requests=4), (17, 2))
    submit(8, families=2)
    machine.run_steps(2)
    machine.pin(0, 1)
    machine.pin(1, 2)
    submit(21, moved=3, max_tokens=4)
    machine.begin_step()
    submit(25)
    machine.run_steps(4)
    has_block = [bool(machine.scheduler._pool.match(hashes[end : end + 1])) for end in range(6)]
    assert has_block == [True, False, False, True, True, True]
    assert told() == [True] + [False] * 5
    machine.unpin_all()
    for _ in range(4):
        submit(25)
        machine.run_steps(4)
    assert told() == [True] * 6


def as_one_chain(self, first, end):
    if first < end:
        yield first, end, int(self.hashes[first - 1, 0]) if first else None


def without_the_last_window(self, block_hashes):
    return KvNames(block_hashes, np.zeros(0, np.uint64), len(block_hashes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [(KvNames, "chains", as_one_chain), (WindowPrefixes, "moved", without_the_last_window)],
)
def test_a_planted_bug_of_transfers_is_found(monkeypatch, owner, name, bug):
    monkeypatch.setattr(owner, name, bug)
    check_that_a_bug_is_found(GroupedSchedulerMachine)
