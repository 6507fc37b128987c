"""Closed-form sums of many decode step times.

At a fixed batch a step's time is piecewise linear in context, and each step adds one token per sequence: the sum over
one piece is an arithmetic series.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.kv.eviction import PrefillPrice
from penstock.perf.latency import LatencyModel
from penstock.sim.engine.timed_tier import LowerTier

_EXACT = 1e-7  # relative distance of inner points from a line, below which a piece is linear
_INNER = (0.5, 0.29, 0.83)
_PRICED_TOKENS = 4096
_PRICED_DEPTH = 16_384
"""Tokens of the prefills that prices of eviction come from: as a chunk, and as a long prompt."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A step with up to `end` context tokens takes `base_s + slope_s * context`."""

    end: int
    base_s: float
    slope_s: float


def prefill_price(latency: LatencyModel, lower_tiers: Sequence[LowerTier] = ()) -> PrefillPrice:
    """Say what lost KV costs, for eviction.

    Args:
        latency: of the engine.
        lower_tiers: below the device, nearest first: the nearest keeps what is evicted.
    """
    first_s = latency.prefill_s(_PRICED_TOKENS)
    deep_s = latency.prefill_s(_PRICED_TOKENS, _PRICED_DEPTH)
    load_s = math.inf
    if lower_tiers:
        load_s = latency.onboard_s(_PRICED_TOKENS * latency.kv_bytes_per_token, lower_tiers[0].tier)
    return PrefillPrice(
        token_s=first_s / _PRICED_TOKENS,
        deeper_s=max(0.0, deep_s - first_s) / _PRICED_TOKENS / _PRICED_DEPTH,
        load_s=load_s / _PRICED_TOKENS,
    )


class DecodePrices:
    """Sums of `LatencyModel.decode_step_s`; caches the pieces of each batch size."""

    def __init__(self, latency: LatencyModel, context_length: int) -> None:
        self._latency = latency
        self._context_length = context_length
        self._pieces: dict[int, list[_Piece]] = {}

    def total_s(self, batch: int, context_tokens: int, steps: int) -> float:
        """Give the seconds of `steps` steps of a batch, the first with `context_tokens`."""
        total_s = 0.0
        for piece in self._pieces_of(batch):
            if context_tokens > piece.end:
                continue
            count = min(steps, (piece.end - context_tokens) // batch + 1)
            first_s = piece.base_s + piece.slope_s * context_tokens
            total_s += count * first_s + piece.slope_s * batch * (count * (count - 1) / 2)
            steps -= count
            if not steps:
                break
            context_tokens += count * batch
        assert not steps, f"{steps} steps beyond the context length"
        return total_s

    def steps_until(self, batch: int, context_tokens: int, seconds: float, most: int) -> int:
        """Count the steps started within `seconds`: 1 to `most`."""
        total_s, done = 0.0, 0
        for piece in self._pieces_of(batch):
            if context_tokens > piece.end:
                continue
            count = min(most - done, (piece.end - context_tokens) // batch + 1)
            first_s, more_s = piece.base_s + piece.slope_s * context_tokens, piece.slope_s * batch
            piece_s = count * first_s + more_s * (count * (count - 1) / 2)
            if total_s + piece_s >= seconds:
                return max(done + _steps_within(first_s, more_s, seconds - total_s, count), 1)
            total_s += piece_s
            done += count
            if done == most:
                break
            context_tokens += count * batch
        return most

    def _pieces_of(self, batch: int) -> list[_Piece]:
        pieces = self._pieces.get(batch)
        if pieces is None:
            pieces = self._pieces[batch] = []
            end = batch * self._context_length
            self._find(pieces, batch, (batch, end), (self._price_s(batch, batch), self._price_s(batch, end)))
        return pieces

    def _find(
        self, pieces: list[_Piece], batch: int, span: tuple[int, int], prices_s: tuple[float, float]
    ) -> None:
        """Add the pieces of a span, halving it until each half is linear."""
        (start, end), (first_s, last_s) = span, prices_s
        slope_s = (last_s - first_s) / (end - start) if end > start else 0.0
        inner = [start + int(part * (end - start)) for part in _INNER]
        if end - start <= batch or all(
            abs(self._price_s(batch, at) - first_s - slope_s * (at - start)) <= _EXACT * first_s
            for at in inner
        ):
            pieces.append(_Piece(end, first_s - slope_s * start, slope_s))
            return
        middle = inner[0]
        middle_s = self._price_s(batch, middle)
        self._find(pieces, batch, (start, middle), (first_s, middle_s))
        self._find(pieces, batch, (middle, end), (middle_s, last_s))

    def _price_s(self, batch: int, context_tokens: int) -> float:
        return self._latency.decode_step_s(batch, context_tokens)


def _steps_within(first_s: float, more_s: float, seconds: float, most: int) -> int:
    """Count the steps until `seconds`, where the first takes `first_s` and each next one `more_s` longer; `most` suffice."""
    half_s = more_s / 2
    linear_s = first_s - half_s
    root_s = math.sqrt(max(linear_s * linear_s + 4 * half_s * seconds, 0.0))
    steps = max(min(math.ceil(2 * seconds / (linear_s + root_s)), most), 1)
    while steps > 1 and (steps - 1) * first_s + more_s * ((steps - 1) * (steps - 2) / 2) >= seconds:
        steps -= 1
    while steps < most and steps * first_s + more_s * (steps * (steps - 1) / 2) < seconds:
        steps += 1
    return steps
