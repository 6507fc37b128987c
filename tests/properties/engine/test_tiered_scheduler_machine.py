"""The scheduler with KV tiers: the same random life, and copies that end late, partly, or after their request is gone.

A copy moves its bytes when it ends, and a load scribbles over its targets until then, so that a target that has got a new
owner, or a source that was reused, shows as KV of another prefix.
"""

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from penstock.core.types.events import Tier
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.kv.manager.manager import KvManager
from tests.properties.engine.test_scheduler_machine import (
    EOS,
    LIMITS,
    LONG_LIVES,
    NUM_BLOCKS,
    SchedulerMachine,
    configs,
)

ROOM = 10


class CellTier:
    """Keeps cells by hash, the oldest forgotten first."""

    tier = Tier.HOST
    num_blocks = ROOM
    shared = None
    block_bytes = 1
    num_corrupt = 0
    is_off = False
    offload_room = 100
    chunk_blocks = 2

    def __init__(self, cells):
        self.cells = cells
        self.kept = {}
        self.loads = []
        self.offloads = []
        self.storing = set()
        self.loaded_blocks = 0

    def start(self, on_change):
        pass

    @property
    def num_cached(self):
        return len(self.kept)

    def locate(self, block_hashes):
        for count, key in enumerate(keys(block_hashes)):
            if key not in self.kept:
                return count
        return len(block_hashes)

    def load_s(self, num_blocks):
        return 0.0

    def load(self, block_hashes, targets, done):
        load = CellLoad([self.kept[key] for key in keys(block_hashes)], list(targets), done)
        assert len(load.sources) == len(load.targets)
        self.loads.append(load)
        return load

    def offload(self, block_hashes, block_ids, done):
        new = [
            (key, block_id)
            for key, block_id in zip(keys(block_hashes), block_ids, strict=True)
            if key not in self.kept and key not in self.storing
        ]
        if not new:
            return ()
        self.storing.update(key for key, _ in new)
        self.offloads.append((new, done))
        return [block_id for _, block_id in new]

    def end_offload(self, number):
        new, done = self.offloads.pop(number)
        for key, block_id in new:
            self.storing.discard(key)
            self.kept[key] = self.cells[block_id].copy()
        while len(self.kept) > self.num_blocks:
            del self.kept[next(iter(self.kept))]
        done([block_id for _, block_id in new])

    def end_load(self, number, count):
        load = self.loads.pop(number)
        count = min(count, len(load.targets))
        for source, target in zip(load.sources[:count], load.targets[:count], strict=True):
            self.cells[target] = source
        self.loaded_blocks += count
        load.done(count)

    def take_events(self):
        return ()

    def clear(self):
        self.kept.clear()


class CellLoad:
    def __init__(self, sources, targets, done):
        self.sources = sources
        self.targets = targets
        self.done = done
        self.is_cancelled = False

    def cancel(self, *, is_late=False):
        self.is_cancelled = True


class Timers:
    def __init__(self):
        self.due = {}

    def time(self):
        return 0.0

    def call_later(self, _seconds, call):
        timer = Timer(self)
        self.due[timer] = call
        return timer


class Timer:
    def __init__(self, timers):
        self.timers = timers

    def cancel(self):
        self.timers.due.pop(self, None)


def keys(block_hashes):
    return [tuple(row) for row in block_hashes.tolist()]


class TieredSchedulerMachine(SchedulerMachine):
    @initialize(config=configs, prefetched=st.sampled_from([0, 1, 16, 16]))
    def start(self, config, prefetched):
        self.config = config = config.model_copy(update={"prefetched_requests": prefetched})
        pool = self.make_pool(NUM_BLOCKS)
        self.tier = CellTier(self.cells)
        self.timers = Timers()
        self.stepped = {}
        self.kv = KvManager(pool, [self.tier], lambda: None, clock=self.timers)
        self.scheduler = Scheduler(pool, LIMITS, config, eos_token_ids=[EOS], kv=self.kv)

    @precondition(lambda self: self.tier.loads)
    @rule(data=st.data(), count=st.integers(0, 12))
    def end_load(self, data, count):
        self.tier.end_load(data.draw(st.integers(0, len(self.tier.loads) - 1)), count)

    @precondition(lambda self: self.tier.loads)
    @rule()
    def end_whole_loads(self):
        while self.tier.loads:
            self.tier.end_load(0, 99)

    @precondition(lambda self: self.tier.offloads)
    @rule(data=st.data())
    def end_offload(self, data):
        self.tier.end_offload(data.draw(st.integers(0, len(self.tier.offloads) - 1)))

    @precondition(lambda self: self.tier.offloads)
    @rule()
    def end_offloads(self):
        while self.tier.offloads:
            self.tier.end_offload(0)

    @precondition(lambda self: self.timers.due)
    @rule()
    def be_late(self):
        timer = next(iter(self.timers.due))
        self.timers.due.pop(timer)()
        assert any(load.is_cancelled for load in self.tier.loads)

    @invariant()
    def loads_scribble(self):
        for load in self.tier.loads:
            self.cells[load.targets] = -(10**9)

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self):
        self.plan = self.scheduler.plan()
        if self.plan is None:
            load = self.scheduler.load()
            waits_for_copies = self.tier.loads or self.tier.offloads
            assert self.held or waits_for_copies or load.waiting_requests == load.running_requests == 0
            self.read(self.scheduler.take_step())

    def compute(self, plan):
        requests = self.scheduler.table.requests
        for slot in plan.slots[: plan.num_decode].tolist():
            assert self.stepped.get(slot) is requests[slot], (
                "a request's first step in a slot is a prefill row"
            )
        self.stepped.update((slot, requests[slot]) for slot in plan.slots.tolist())
        return super().compute(plan)

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        for _ in range(200):
            self.end_whole_loads()
            self.end_offloads()
            self.run_steps(20)
            if not (self.expected or self.tier.loads or self.tier.offloads or self.plan):
                break
            self.unpin_all()
        while self.tier.loads or self.tier.offloads:
            self.end_whole_loads()
            self.end_offloads()
        super().teardown()
        assert not self.kv.holders(), "nothing is under way"
        assert not self.timers.due
        event("loaded" if self.tier.loaded_blocks else "loaded nothing")
        counters = self.kv._counters[self.tier]
        assert counters.wasted_blocks <= counters.prefetched_blocks
        if counters.prefetched_blocks:
            event(
                "prefetched, and used"
                if counters.wasted_blocks < counters.prefetched_blocks
                else "prefetched"
            )


TieredSchedulerMachine.TestCase.settings = LONG_LIVES
TestTieredSchedulerMachine = TieredSchedulerMachine.TestCase
