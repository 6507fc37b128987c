"""The scheduler with sessions of agents: the same random life, in which requests open, use and close sessions, and time passes.

Whatever sessions keep must stay resident and unwritten, within the quota, and must not keep any request from its end.
"""

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from msgspec.structs import replace

from penstock.core.types.requests import Request, SamplingParams, SessionAction, SessionControl
from penstock.core.wire import pack_tokens
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.kv.sessions.config import SessionsConfig
from penstock.kv.sessions.session import SessionKey
from penstock.kv.sessions.sessions import Sessions
from tests.properties.engine.test_scheduler_machine import (
    EOS,
    LIMITS,
    LONG_LIVES,
    NUM_BLOCKS,
    VOCAB,
    SchedulerMachine,
    configs,
)
from tests.support.manual_clock import ManualClock

TTL_S = 10
OPEN, CLOSE = SessionAction.OPEN, SessionAction.CLOSE
controls = st.sampled_from(
    [
        None,
        SessionControl(action=OPEN),
        SessionControl(action=OPEN),
        SessionControl(action=OPEN, is_ephemeral=True),
        SessionControl(action=CLOSE),
        SessionControl(action=CLOSE, is_ephemeral=True),
    ]
)
roles = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), controls), min_size=3, max_size=8)
"""Session and control of requests, by turns."""


class SessionSchedulerMachine(SchedulerMachine):
    @initialize(
        config=configs, share=st.sampled_from([0.25, 0.5, 0.9]), sessions_max=st.integers(1, 4), roles=roles
    )
    def start(self, config, share, sessions_max, roles):
        self.roles = roles
        bounds = SessionsConfig(kv_share=share, sessions_max=sessions_max, ttl_s=TTL_S)
        self.config = config.model_copy(update={"sessions": bounds})
        pool = self.make_pool(NUM_BLOCKS)
        self.scheduler = Scheduler(pool, LIMITS, self.config, eos_token_ids=[EOS])
        self.clock = ManualClock()
        self.scheduler.sessions._clock = self.clock
        self.pool = pool
        self.sessions: Sessions = self.scheduler.sessions
        self.seen = {}  # chain -> what was in its blocks when it was first seen
        self.most_kept = 0

    def submit_one(self, request, prompt):
        session, control = self.roles[self.num_submitted % len(self.roles)]
        if session is not None:  # prefill workers keep nothing
            request = replace(request, session=session, session_control=control, prefill_only=False)
        super().submit_one(request, prompt)

    @rule(
        family=st.integers(0, 3),
        length=st.integers(8, 24),
        max_tokens=st.integers(1, 8),
        is_speculative=st.booleans(),
    )
    def take_turn(self, family, length, max_tokens, *, is_speculative):
        """Have a request of a session that is open run, often to its end."""
        self.num_submitted += 1
        prompt = [(family + 7 * index) % VOCAB for index in range(length)]
        request = Request(
            request_id=f"r{self.num_submitted}",
            model="m",
            token_ids=pack_tokens(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            session=None if is_speculative else "abc"[family % 3],
            session_control=None if is_speculative else SessionControl(action=OPEN, is_ephemeral=family == 3),
            speculative_prefill=is_speculative,
        )
        SchedulerMachine.submit_one(self, request, prompt)
        self.run_steps(15)

    @rule(seconds=st.sampled_from([1, TTL_S - 1, TTL_S + 1]))
    def pass_time(self, seconds):
        self.clock.advance(seconds)

    @rule(name=st.sampled_from("abc"))
    def close(self, name):
        self.sessions.unpin(SessionKey("", name))

    @invariant()
    def kept_blocks_are_resident_and_unwritten(self):
        kept = 0
        seen = {}
        for session in self.sessions:
            for chain in session.chains:
                block_ids, hashes = chain.block_ids, chain.hashes
                assert self.pool.match(hashes[: len(block_ids)]) == block_ids, "a kept block was evicted"
                before = self.seen.get(id(chain), (chain, self.cells[block_ids].copy()))
                assert (self.cells[block_ids] == before[1][: len(block_ids)]).all(), (
                    "a kept block was written"
                )
                seen[id(chain)] = before
                kept += len(block_ids)
        self.seen = seen
        self.most_kept = max(self.most_kept, kept)
        assert (
            len({b for s in self.sessions for c in s.chains for b in c.block_ids}) <= self.sessions.blocks_max
        )

    def teardown(self):
        self.unpin_all()
        for _ in range(2000):
            self.unpin_all()
            if self.plan is None:
                self.begin_step()
                if self.plan is None:
                    break
            self.end_step()
        assert not self.expected, "sessions keep a request from its end"
        self.clock.advance(TTL_S + 1)
        assert len(self.sessions) == 0, "it never expires"
        self.sessions.check()
        self.read(self.scheduler.take_step())
        super().teardown()
        event(f"kept {min(self.most_kept, 6)} blocks or more" if self.most_kept else "kept nothing")
        if self.sessions.counts is not None:
            event(
                f"yielded: {bool(self.sessions.counts.yielded)}, displaced: {bool(self.sessions.counts.displaced)}"
            )


SessionSchedulerMachine.TestCase.settings = LONG_LIVES
TestSessionSchedulerMachine = SessionSchedulerMachine.TestCase
