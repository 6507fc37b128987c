"""Whoever spends what is left makes no more than the allowed part of the steps late, over any time, but for one account's."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.router.disagg.itl_budget import WINDOW_S
from penstock.testing.routing_policy import make_context, make_prices
from tests.support.itl_budget import itl_budget

SHARE, STEP_S = 0.02, 0.01
PEERS = np.array([1])


class LateTokensMachine(RuleBasedStateMachine):
    """A worker whose streams make a step each 10 ms while it computes no prompt, and two routers that send it some."""

    def __init__(self):
        super().__init__()
        self.routers = [itl_budget(SHARE, PEERS) for _ in range(2)]
        self.now_s = 0.0
        self.plain_s = 0.0  # model: the time in which steps were not late
        self.late = []  # model: `plain_s` before them, and how many
        self.dearest_s = 0.0

    def budget(self, router):
        context = make_context(1, now_s=self.now_s, prices=make_prices(1, decode_step_s=[STEP_S]))
        return self.routers[router].override(context)

    @rule(seconds=st.floats(0.0, 3 * WINDOW_S))
    def stream(self, seconds):
        self.now_s += seconds
        self.plain_s += seconds

    @rule(router=st.integers(0, 1), steps=st.integers(1, 15), step_s=st.floats(0.0, 2.0))
    def ask(self, router, steps, step_s):
        """A prompt that takes so many steps is computed beside the streams if it may be."""
        found, took_s = self.budget(router), steps * step_s
        cost_s = steps * float(found.step_s[0]) + took_s
        if cost_s <= found.left_s[0] or found.left_s[0] >= found.most_s[0]:
            self.routers[router].spend(0, cost_s, self.now_s)
            self.late.append((self.plain_s, steps))
            self.dearest_s = max(self.dearest_s, 2 * cost_s)
            self.now_s += took_s

    @invariant()
    def no_more_than_the_part_is_late(self):
        for since_s, _ in self.late:
            late = sum(steps for at_s, steps in self.late if at_s >= since_s)
            plain_s = self.plain_s - since_s
            assert late <= SHARE * (plain_s + max(WINDOW_S, self.dearest_s)) / STEP_S * (1 + 1e-9)

    @invariant()
    def what_was_spent_long_ago_is_forgotten(self):
        last_s = max((at_s for at_s, _ in self.late), default=-np.inf)
        if self.plain_s - last_s >= max(WINDOW_S, self.dearest_s):
            for router in range(2):
                found = self.budget(router)
                assert found.left_s[0] == found.most_s[0]


TestLateTokens = LateTokensMachine.TestCase
