"""Whoever spends only what is left makes no more than the allowed part late, over any time, but for one window's."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.router.late_tokens import WINDOW_S, LateTokens
from penstock.testing.routing_policy import make_context, make_prices

SHARE, STEP_S = 0.02, 0.01


class LateTokensMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.routers = [LateTokens(SHARE, 1) for _ in range(2)]
        self.peers = np.array([1])
        self.now_s = 0.0
        self.late = []  # model: when, how many

    def context(self):
        return make_context(1, now_s=self.now_s, prices=make_prices(1, decode_step_s=[STEP_S]))

    @rule(seconds=st.floats(0.0, 3 * WINDOW_S))
    def go_on(self, seconds):
        self.now_s += seconds

    @rule(router=st.integers(0, 1), steps=st.integers(1, 15))
    def ask(self, router, steps):
        """A prompt that makes so many steps late is computed beside streams if it may be."""
        table = self.routers[router]
        if steps <= table.left(self.context(), self.peers)[0]:
            table.spend(0, steps, self.context(), self.peers)
            self.late.append((self.now_s, steps))

    @invariant()
    def no_more_than_the_part_is_late(self):
        for since_s, _ in self.late:
            steps = sum(count for at_s, count in self.late if at_s >= since_s)
            seconds = self.now_s - since_s + WINDOW_S
            assert steps <= SHARE * seconds / STEP_S * (1 + 1e-9)

    @invariant()
    def what_was_spent_long_ago_is_forgotten(self):
        quiet_s = self.now_s - max((at_s for at_s, _ in self.late), default=-2 * WINDOW_S)
        if quiet_s >= WINDOW_S:
            for table in self.routers:
                full = SHARE * WINDOW_S / STEP_S / 2
                assert abs(table.left(self.context(), self.peers)[0] - full) < 1e-9


TestLateTokens = LateTokensMachine.TestCase
