"""The scheduler under random requests, aborts, failures and time, against texts generated one request at a time.

The test is the runner: it writes into each token's place in the pool which prefix it belongs to, and checks what it
reads, so that a block shared, freed or overwritten too early shows.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.core.errors import EngineError, Overloaded
from penstock.core.hashing import block_hashes
from penstock.core.types.events import BlockRemoved, BlockStored
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.core.wire import pack_tokens, unpack_hashes, unpack_tokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequences import Sampled, SequenceLimits
from penstock.kv.groups import Windows
from penstock.kv.pool import BlockPool

BLOCK_SIZE = 4
NUM_BLOCKS = 12
VOCAB = 40
EOS = 39
LIMITS = SequenceLimits(
    block_size=BLOCK_SIZE,
    model_context_length=40,
    kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
    vocab_size=VOCAB,
    hash_key=bytes(16),
)
windows = st.sampled_from(
    [Windows(), Windows(), Windows(((6, 1),), 1), Windows(((5, 5), (9, 2)), 2), Windows(((1, 1),), 1)]
)
configs = st.sampled_from(
    [
        SchedulerConfig(
            max_batch_tokens=batch,
            max_prompt_tokens=of_one,
            max_running_requests=running,
            max_waiting_requests=4,
            order=order,
            ageing=ageing,
        )
        for order, ageing in (("fcfs", 1.0), ("shortest", 0.1), ("shortest", 0.5))
        for batch, of_one, running in ((20, None, 6), (10, None, 4), (3, None, 4), (20, 7, 6), (10, 1, 4))
    ]
)


def next_token(known):
    return hash(tuple(known)) % VOCAB


def whole_answer(prompt, sampling):
    """What a request must yield: tokens, and why it ends."""
    known = list(prompt)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    while True:
        known.append(next_token(known))
        emitted = len(known) - len(prompt)
        if known[-1] in stops and emitted > sampling.min_tokens:
            return known[len(prompt) :], FinishReason.STOP
        if emitted == sampling.max_tokens or len(known) == LIMITS.context_length:
            return known[len(prompt) :], FinishReason.LENGTH


class Expectation:
    def __init__(self, request, prompt, done):
        self.request = request
        self.prompt = prompt
        self.tokens, self.reason = whole_answer(prompt, request.sampling)
        self.emitted = done
        self.heard = False


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.num_submitted = 0
        self.windows = LIMITS.windows
        self.expected = {}  # request id -> Expectation, of those submitted and neither ended nor aborted
        self.plan = None
        self.resident = set()
        self.generated = 0
        self.held = []  # (blocks held from outside, what was in them)
        self.parents = {}  # low64 of every full block computed -> low64 of its parent
        self.marked = {}  # request id -> blocks of its windows at its last step

    @initialize(config=configs, windows=windows)
    def start(self, config, windows):
        self.config, self.windows = config, windows
        of_one = windows.blocks(LIMITS.kv_tokens, config.prompt_budget, BLOCK_SIZE)
        pool = self.make_pool(NUM_BLOCKS + of_one)
        assert windows.tokens_beside(pool.num_blocks, config.prompt_budget, BLOCK_SIZE) >= LIMITS.kv_tokens
        self.scheduler = Scheduler(pool, replace(LIMITS, windows=windows), config, eos_token_ids=[EOS])

    def make_pool(self, num_blocks):
        """Make a pool, and the cells of its blocks."""
        self.cells = np.zeros((num_blocks, BLOCK_SIZE), dtype=np.int64)
        return BlockPool(num_blocks, BLOCK_SIZE)

    # ---- requests -------------------------------------------------------------------------------------
    @rule(
        burst=st.integers(1, 4),
        length=st.integers(1, 12) | st.integers(1, 30),
        sampling=st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 5) | st.integers(20, 30),
            min_tokens=st.integers(0, 6),
            ignore_eos=st.booleans(),
            stop_token_ids=st.sampled_from([(), (), (1, 2, 3), tuple(range(0, VOCAB, 4))]),
        ),
        moved=st.integers(0, 3),
        prefill_only=st.booleans(),
        has_tail=st.booleans(),
    )
    def submit(self, burst, length, sampling, moved, *, prefill_only, has_tail):
        for family in range(burst):
            prompt = [(family + 7 * index) % VOCAB for index in range(length)]  # a family shares prefixes
            whole, _ = whole_answer(prompt, sampling)
            done = min(moved, len(whole) - 1)
            self.num_submitted += 1
            request = Request(
                request_id=f"r{self.num_submitted}",
                model="m",
                token_ids=pack_tokens(prompt + whole[:done]),
                sampling=sampling,
                num_emitted=done,
                prefill_only=prefill_only,
            )
            tail = self.scheduler.reserve(1) if has_tail else None
            self.submit_one(request, prompt)
            if tail is not None:
                self.give(request, prompt + whole[:done], *tail)

    def give(self, request, known, block_id):
        """Have a request begin with a block that came from elsewhere: all its tokens after full blocks but the last one."""
        full, tokens = divmod(len(known) - 1, BLOCK_SIZE)
        for position in range(tokens):
            self.cells[block_id, position] = hash(tuple(known[: full * BLOCK_SIZE + position + 1]))
        self.cells[block_id, tokens:] = 0
        self.scheduler.give_partial_block(request.request_id, block_id, tokens)

    def submit_one(self, request, prompt):
        waiting = self.scheduler.load().waiting_requests
        try:
            self.scheduler.submit(request)
        except Overloaded:
            assert waiting >= self.config.max_waiting_requests
        else:
            assert waiting < self.config.max_waiting_requests
            self.expected[request.request_id] = Expectation(request, prompt, request.num_emitted)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        self.scheduler.abort(request_id)
        del self.expected[request_id]

    # ---- blocks held from outside ---------------------------------------------------------------------
    @rule(family=st.integers(0, 3), blocks=st.integers(1, 5))
    def pin(self, family, blocks):
        prompt = [(family + 7 * index) % VOCAB for index in range(blocks * BLOCK_SIZE)]
        self.hold(self.scheduler.pins.pin(block_hashes(prompt, BLOCK_SIZE)))

    @rule(count=st.integers(1, 4))
    def reserve(self, count):
        taken = self.scheduler.reserve(count)
        if taken is not None:
            self.cells[taken] = -self.num_submitted - 1
            self.hold(taken)

    def hold(self, block_ids):
        if block_ids:
            self.held.append((block_ids, self.cells[block_ids].copy()))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin(self, data):
        block_ids, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.scheduler.pins.unpin(block_ids)

    @invariant()
    def held_blocks_stay_as_they_are(self):
        for block_ids, before in self.held:
            assert (self.cells[block_ids] == before).all(), "a held block was written"

    # ---- steps ----------------------------------------------------------------------------------------
    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self):
        self.plan = self.scheduler.plan()
        # A request that waits again has given its blocks back, also where nothing else is left to run.
        running = {request.request_id for request in self.scheduler.table.requests if request is not None}
        self.marked = {name: blocks for name, blocks in self.marked.items() if name in running}
        if self.plan is None:
            assert self.held or self.scheduler.load().waiting_requests == 0
            assert self.scheduler.load().running_requests == 0
            self.read(self.scheduler.take_step())
        else:
            assert 1 <= self.plan.num_new.sum() <= self.config.max_batch_tokens
            assert self.plan.num_new.max() <= self.config.prompt_budget
            assert (self.plan.num_new[: self.plan.num_decode] == 1).all()
            assert self.plan.samples[: self.plan.num_decode].all()

    @precondition(lambda self: self.plan is not None)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def end_step(self, *, fails=False):
        if fails:
            self.fail_step()
            return
        plan, self.plan = self.plan, None
        self.read(self.scheduler.commit(plan, self.compute(plan)))

    def fail_step(self):
        plan, self.plan = self.plan, None
        table = self.scheduler.table
        ids = {table.requests[slot].request_id for slot in plan.slots.tolist()}
        step = self.scheduler.fail(plan, EngineError("it broke"))
        failed = {
            delta.request_id for delta in step.deltas if delta.error and delta.error.code == "engine_error"
        }
        assert failed == ids & set(self.expected)
        self.read(step)

    @rule(count=st.integers(1, 12))
    def run_steps(self, count):
        for _ in range(count):
            if self.plan is None:
                self.begin_step()
            if self.plan is not None:
                self.end_step()

    def use_windows(self, slot, start, end):
        """Write into the blocks of a request's windows, which must be enough for a step, and are nobody else's."""
        request_id = self.scheduler.table.requests[slot].request_id
        blocks, mark = self.scheduler._slots.windows[slot], -hash(request_id)
        in_layers = sum(
            count * len({token // BLOCK_SIZE for token in range(max(0, start - window + 1), end)})
            for window, count in self.windows.layers
        )
        assert len(blocks) * self.windows.whole_layers >= in_layers, "a window's block is missing"
        kept = [block_id for block_id in blocks if block_id in self.marked.get(request_id, ())]
        assert (self.cells[kept] == mark).all(), "a block of a window was written by others"
        self.cells[blocks] = mark
        self.marked[request_id] = set(blocks)

    def compute(self, plan):
        table = self.scheduler.table
        sampled = np.full(len(plan.slots), -1, dtype=np.int32)
        places = set()
        for row, slot in enumerate(plan.slots.tolist()):
            known = table.token_ids[slot, : table.num_tokens[slot]].tolist()
            start = int(table.num_computed[slot])
            end = start + int(plan.num_new[row])
            assert plan.samples[row] == (end == len(known))
            self.use_windows(slot, start, end)
            for position in range(end):
                place = (int(table.block_tables[slot, position // BLOCK_SIZE]), position % BLOCK_SIZE)
                digest = hash(tuple(known[: position + 1]))
                if position >= start:
                    assert place not in places, "two tokens of a step in one place"
                    places.add(place)
                    self.cells[place] = digest
                assert self.cells[place] == digest, "KV of another prefix"
            hashes = block_hashes(known[:end], BLOCK_SIZE)[:, 0].tolist()
            self.parents.update(zip(hashes, [None, *hashes], strict=False))
            if plan.samples[row]:
                sampled[row] = next_token(known)
        return Sampled(sampled)

    def read(self, step):
        if step is None:
            return
        for delta in step.deltas:
            expected = self.expected[delta.request_id]  # a KeyError is a delta after the end, or after abort
            tokens = unpack_tokens(delta.token_ids).tolist()
            assert tokens == expected.tokens[expected.emitted : expected.emitted + len(tokens)]
            expected.emitted += len(tokens)
            self.generated += len(tokens)
            assert (delta.cached_tokens is not None) == (bool(tokens) and not expected.heard)
            expected.heard |= bool(tokens)
            if delta.finish_reason is not None:
                self.claim_partial_block(self.expected.pop(delta.request_id), delta.finish_reason)
            if delta.finish_reason is not FinishReason.ERROR:
                whole = expected.emitted == len(expected.tokens)
                assert delta.finish_reason == (expected.reason if whole else None)
        for change in step.events:
            hashes = unpack_hashes(change.block_hashes).tolist()
            if isinstance(change, BlockStored):
                chain = [change.parent_block_hash, *hashes]
                assert [self.parents[low64] for low64 in hashes] == chain[:-1]
                assert self.resident.isdisjoint(hashes)
                self.resident.update(hashes)
            else:
                assert isinstance(change, BlockRemoved)
                assert self.resident.issuperset(hashes)
                self.resident.difference_update(hashes)

    def claim_partial_block(self, ended, reason):
        """Of two requests that end with one block in the middle of another, one's is claimed, and stays as it is."""
        request = ended.request
        known = [*ended.prompt, *ended.tokens[: ended.emitted]]
        if int(request.request_id[1:]) % 2:
            return
        block_id = self.scheduler.partial_blocks.claim(request.request_id)
        full, tokens = divmod(len(known) - 1, BLOCK_SIZE)
        is_kept = request.prefill_only and tokens > 0 and reason is not FinishReason.ERROR
        assert (block_id is not None) == is_kept
        if block_id is not None:
            for position in range(tokens):
                digest = hash(tuple(known[: full * BLOCK_SIZE + position + 1]))
                assert self.cells[block_id, position] == digest, "the tail of another prompt"
            self.hold([block_id])

    def check_told(self, cached_blocks):
        assert len(self.resident) == cached_blocks

    @invariant()
    def state_is_sound(self):
        if self.plan is None:
            self.scheduler.check()

    def unpin_all(self):
        while self.held:
            self.scheduler.pins.unpin(self.held.pop()[0])

    def teardown(self):
        for _ in range(2000):
            self.unpin_all()  # also the tails of those that ended just now
            if self.plan is None:
                self.begin_step()
                if self.plan is None:
                    break
            self.end_step()
        self.unpin_all()
        assert self.plan is None, "it never comes to rest"
        assert not self.expected, "accepted, but never answered"
        load = self.scheduler.load()
        assert load.active_blocks == 0
        assert load.queued_prefill_tokens == 0
        assert load.generated_tokens >= self.generated
        self.check_told(load.cached_blocks)
        self.scheduler.check()
        event(
            f"preempted {min(load.preemptions, 3)} times or more" if load.preemptions else "never preempted"
        )


LONG_LIVES = settings(max_examples=max(20, settings.default.max_examples // 2), stateful_step_count=40)


def check_that_a_bug_is_found(machine):
    """Run a machine while a bug is planted."""
    phases = (Phase.generate,)
    of_bugs = settings(max_examples=300, stateful_step_count=40, deadline=None, database=None, phases=phases)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=of_bugs)


SchedulerMachine.TestCase.settings = LONG_LIVES
TestSchedulerMachine = SchedulerMachine.TestCase
