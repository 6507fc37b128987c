"""How many steps of its streams each decode worker may still have made late by prompts that it computes beside them.

A prompt is late where all wait for the same prefill workers; where it is computed beside streams, their next token is.
While such steps are fewer than the part of all steps that may be late, percentiles of the time between tokens below that
part do not show them, whereas a queue's longest waits are what the percentiles of first tokens are made of.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.core.routing_context import TOKEN_S_MIN
from penstock.seams import RoutingContext

WINDOW_S = 10.0
"""Steps that were not late may be made up for within this time, so that the part is kept over a minute as well."""


class LateTokens:
    """Accounts by worker slot, of one router. One event loop owns it."""

    def __init__(self, share: float, num_slots: int) -> None:
        """Allow this part of each worker's steps to be late; 0 for none."""
        self._share = share
        self._empty_s = np.full(num_slots, -np.inf)  # when an account had nothing left, or will have nothing

    def left(self, context: RoutingContext, peers: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Say how many steps may be late by now.

        Args:
            context: of whatever request.
            peers: (num_slots,) other routers, each of which has its part.

        Returns:
            (num_slots,) steps, below nothing where too many were; None where none ever may.
        """
        if not self._share:
            return None
        left_s = np.minimum(context.now_s - self._empty_s, WINDOW_S)
        steps: NDArray[np.float64] = left_s / self._late_step_s(context, peers)
        return steps

    def spend(self, slot: int, steps: int, context: RoutingContext, peers: NDArray[np.int64]) -> None:
        """Note that a prompt was sent that makes so many late; it takes a window at most until none count any more."""
        if self._share:
            now_s, spent_s = context.now_s, steps * float(self._late_step_s(context, peers)[slot])
            empty_s = max(self._empty_s[slot], now_s - WINDOW_S) + spent_s
            self._empty_s[slot] = min(empty_s, now_s + WINDOW_S)

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        more = num_slots - len(self._empty_s)
        self._empty_s = np.pad(self._empty_s, (0, more), constant_values=-np.inf)

    def forget(self, slot: int) -> None:
        """Know nothing of a worker."""
        self._empty_s[slot] = -np.inf

    def check(self, num_slots: int) -> None:
        """Raise AssertionError where there are not as many accounts as slots."""
        assert len(self._empty_s) == num_slots, "late tokens: as long as the loads"

    def _late_step_s(self, context: RoutingContext, peers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Say in what time one step may be late."""
        late_step_s: NDArray[np.float64] = (
            np.maximum(context.step_s(), TOKEN_S_MIN) * (1 + peers) / self._share
        )
        return late_step_s
