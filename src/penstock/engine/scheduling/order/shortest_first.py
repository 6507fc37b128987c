"""Shortest-prompt-first order with ageing.

A request's rank is the number of prompt tokens it still has to compute, plus `ageing` times the prompt tokens that the
engine had computed in total when the request arrived; the lowest rank is next. Waiting is counted in prompt tokens too, so
the order needs no clock and is the same at any speed. A request with n tokens to compute can be overtaken only by requests
that arrive while the engine computes the next n / `ageing` tokens.
"""

from penstock.engine.scheduling.order.ranked_queue import Ranked


class ShortestFirst:
    """A `PromptOrder`: fewest missing tokens first."""

    turn_tokens: int | None = None

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def rank(self, sequence: Ranked, lacking: int) -> float:
        return lacking + self._ageing * sequence.since_tokens

    def note(self, sequence: Ranked, left: int) -> None:
        """Need to know nothing of what is computed."""

    def on_idle(self) -> None:
        """Nothing to reset."""
