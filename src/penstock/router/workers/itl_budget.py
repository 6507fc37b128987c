"""ITL interference budget: how many decode steps a prompt computed on a decode worker may still delay.

A prompt is late where all wait for the same prefill workers; where it is computed beside streams, their next token is.
While such steps are fewer than the part of all steps that may be late, percentiles of the time between tokens below that
part do not show them, whereas a queue's longest waits are what the percentiles of first tokens are made of.

A worker's account is kept in seconds: it fills as time passes, and a late step costs what as many steps as one of them may
be late take, and what it takes itself, in which none of these is made.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.routing_context import TOKEN_S_MIN
from penstock.seams import RoutingContext

WINDOW_S = 10.0
"""What an account holds: bursts are where late steps are of use, and over a minute the part is to be kept as well."""


@dataclass(frozen=True, slots=True)
class Budget:
    """One router's part of each worker's account, (num_slots,) seconds: `left_s`, below nothing where too much was spent, of `most_s`.

    A late step costs `step_s` and what it takes itself.
    """

    left_s: NDArray[np.float64]
    most_s: NDArray[np.float64]
    step_s: NDArray[np.float64]


class ItlBudget:
    """Accounts by worker slot, of one router. One event loop owns it."""

    def __init__(self, share: float, num_slots: int) -> None:
        """Allow this part of each worker's steps to be late; 0 for none."""
        self._share = share
        self._empty_s = np.full(num_slots, -np.inf)  # when an account had nothing left, or will have nothing

    def budget(self, context: RoutingContext, peers: NDArray[np.int64]) -> Budget | None:
        """Say what may be late by now; None where nothing ever may.

        Args:
            context: of whatever request.
            peers: (num_slots,) other routers, each of which has its part.
        """
        if not self._share:
            return None
        routers = 1 + peers
        return Budget(
            left_s=np.minimum(context.now_s - self._empty_s, WINDOW_S) / routers,
            most_s=WINDOW_S / routers,
            step_s=np.maximum(context.step_s(), TOKEN_S_MIN) / self._share,
        )

    def spend(self, slot: int, seconds: float, now_s: float, peers: int) -> None:
        """Take what a prompt costs off a worker's account; it never lacks more than that afterwards, or a window."""
        spent_s = seconds * (1 + peers)
        empty_s = max(self._empty_s[slot], now_s - WINDOW_S) + spent_s
        self._empty_s[slot] = min(empty_s, now_s + max(spent_s, WINDOW_S))

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        more = num_slots - len(self._empty_s)
        self._empty_s = np.pad(self._empty_s, (0, more), constant_values=-np.inf)

    def forget(self, slot: int) -> None:
        """Know nothing of a worker."""
        self._empty_s[slot] = -np.inf

    def check(self, num_slots: int) -> None:
        """Raise AssertionError where there are not as many accounts as slots."""
        assert len(self._empty_s) == num_slots, "ITL budgets: as many as loads"
