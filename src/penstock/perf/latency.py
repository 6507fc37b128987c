"""Latency models: their interface, a fit to few coefficients that workers publish and routers use, and its correction by measured step times."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.types.events import Tier
from penstock.core.types.instances import Prices


class LatencyModel(Protocol):
    """Latency estimates of one engine. Pure: equal arguments give equal results."""

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of one more token of a long context: in the layers that have no sliding window, if any has none."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of `kv_bytes_per_token` that fit into the engine's memory."""
        ...

    def kv_held_tokens(self, tokens: float) -> float:
        """Tokens of `kv_bytes_per_token` that a request of `tokens` tokens holds, sliding windows included."""
        ...

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to prefill `new_tokens` of one prompt after `cached_tokens` found in the cache."""
        ...

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of one step with several (new, cached) prompts."""
        ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of one decode step of `batch` sequences; `context_tokens` is the sum of their lengths."""
        ...

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Seconds of one step with prefill chunks and decode, as with chunked prefill."""
        ...

    def onboard_s(self, num_bytes: float, tier: Tier) -> float:
        """Seconds to load blocks from a lower tier into the device."""
        ...


def num_pairs(new: int, cached: int) -> float:
    """Count (new token, attended token) pairs of a causal prompt."""
    return new * cached + new * (new + 1) / 2


def fit_non_negative(
    rows: Sequence[tuple[float, ...]],
    seconds: Sequence[float],
    *,
    weights: Sequence[float] = (),
    ridge: Sequence[float] = (),
) -> tuple[float, ...]:
    """Fit coefficients >= 0 by least squares of the relative error.

    Drops the term with the most negative coefficient until none is negative.

    Args:
        rows: one tuple of terms per measurement.
        seconds: the measurements.
        weights: of the measurements' squared errors; empty: equal ones.
        ridge: by term, the weight of a pull towards 0: of terms that measurements cannot tell apart, those without one explain
            the time. Empty: no term has one.

    Returns:
        One coefficient per term.
    """
    wanted = np.sqrt(weights) if weights else np.ones(len(rows))
    design = np.array(rows) * (wanted / np.array(seconds))[:, None]
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1
    pulls = np.diag(np.sqrt(ridge)) if ridge else np.zeros((0, design.shape[1]))
    design = np.vstack((design / scale, pulls))
    wanted = np.concatenate((wanted, np.zeros(len(pulls))))
    terms = np.zeros(design.shape[1])
    kept = list(range(design.shape[1]))
    while kept:
        solution = np.linalg.lstsq(design[:, kept], wanted, rcond=None)[0]
        if solution.min() >= 0:
            terms[kept] = solution / scale[kept]
            break
        kept.pop(int(solution.argmin()))
    return tuple(terms.tolist())


_NEW_TOKENS = tuple(256 << k for k in range(7))
"""Shorter prompts take the time of reading the weights, which a decode step in the same batch reads anyway."""
_CACHED_TOKENS = (0, 1 << 10, 1 << 12, 1 << 14, 1 << 16)
_BATCHES = (1, 4, 16, 32, 64, 128, 256)
_CONTEXTS = (256, 1 << 10, 1 << 12, 1 << 14)
_ONBOARDED_BYTES = 1e9  # large, so that a transfer's fixed cost is negligible


def publish(latency: LatencyModel, *, context_length: int) -> Prices:
    """Fit coefficients to a latency model by least squares of the relative error, over feasible prompts and batches.

    Args:
        latency: the model; a tier it does not support stays None.
        context_length: longest prompt and sequence, in tokens.
    """
    prompts = list(_prompts(context_length))
    batches = list(_batches(latency, context_length))
    prefill_rows = [(1.0, new, num_pairs(new, cached)) for new, cached in prompts]
    decode_rows = [(1.0, batch, batch * context) for batch, context in batches]
    prefill_s = [latency.prefill_s(new, cached) for new, cached in prompts]
    decode_s = [latency.decode_step_s(batch, batch * context) for batch, context in batches]
    prefill = fit_non_negative(prefill_rows, prefill_s)
    decode = fit_non_negative(decode_rows, decode_s)
    errors = np.concatenate(
        [
            np.array(prefill_rows) @ prefill / prefill_s - 1,
            np.array(decode_rows) @ decode / decode_s - 1,
        ]
    )
    return Prices(
        prefill_step_s=prefill[0],
        prefill_token_s=prefill[1],
        prefill_pair_s=prefill[2],
        decode_step_s=decode[0],
        decode_sequence_s=decode[1],
        decode_token_s=decode[2],
        onboard_token_s=tuple(_onboard_token_s(latency)),
        error=float(np.abs(errors).mean()),
    )


def _prompts(context_length: int) -> Iterator[tuple[int, int]]:
    """Yield (new, cached) tokens; at least three lengths even for a short context, to fit a line."""
    lengths = [n for n in _NEW_TOKENS if n < context_length]
    for new in sorted({*lengths, *(max(context_length * part // 4, 1) for part in (1, 2, 4))}):
        for cached in _CACHED_TOKENS:
            if new + cached <= context_length:
                yield new, cached


def _batches(latency: LatencyModel, context_length: int) -> Iterator[tuple[int, int]]:
    """Yield (batch, context per sequence) whose KV fits; (1, 1) always comes first."""
    room = latency.kv_capacity_tokens or float("inf")
    yield 1, 1
    for batch in _BATCHES:
        for context in _CONTEXTS:
            if context <= context_length and batch * latency.kv_held_tokens(context) <= room:
                yield batch, context


def _onboard_token_s(latency: LatencyModel) -> Iterator[float]:
    if not latency.kv_bytes_per_token:
        return
    tokens = _ONBOARDED_BYTES / latency.kv_bytes_per_token
    for tier in Tier:
        try:
            yield latency.onboard_s(_ONBOARDED_BYTES, tier) / tokens
        except ConfigError:  # a profile without a roofline has no tiers
            return


_SIZES = tuple(64 << power for power in range(9))
_ABOUT = 0.95


def saturating_tokens(prices: Prices) -> int:
    """Find the smallest step, of 64, 128, ... 16,384 tokens, with about the best token rate.

    Its rate is at most 5 % below the best. Smaller steps pay the fixed cost of a step too often. Larger ones gain nothing,
    and delay the next prompt and the KV transfer, which goes step by step.
    """
    rates = {size: size / _seconds(prices, size) for size in _SIZES}
    return next(size for size, rate in rates.items() if rate >= _ABOUT * max(rates.values()))


def _seconds(prices: Prices, tokens: int) -> float:
    pairs_s = num_pairs(tokens, 0) * prices.prefill_pair_s
    step_s = prices.prefill_step_s + tokens * prices.prefill_token_s + pairs_s
    return step_s or tokens * 1e-9  # an engine with zero step time has the same rate at any size


FACTOR_MIN, FACTOR_MAX = 0.125, 8.0
_RATIO_MAX = 1000.0
"""Measured / predicted is clamped to this factor either way."""
_LOG_MIN, _LOG_MAX = math.log(FACTOR_MIN), math.log(FACTOR_MAX)


@dataclass(slots=True)
class Correction:
    """Factor by which a worker is slower (above 1) or faster than predicted. One task owns it.

    weight: weight of each new step; 0.25 reaches 99 % of a sudden change in 16 steps.
    residual_max: mean factor between measured and corrected time beyond which the model is not trusted.
    """

    weight: float = 0.25
    residual_max: float = 2.0
    observations: int = 0
    _log_factor: float = 0.0
    _log_residual: float = 0.0
    _recent: list[float] = field(default_factory=list)

    @property
    def factor(self) -> float:
        return math.exp(self._log_factor)

    @property
    def trusted(self) -> bool:
        """Whether corrected estimates are accurate enough for decisions."""
        return self._log_residual <= math.log(self.residual_max)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Update from one step; `predicted_s` is uncorrected. Steps with a zero time are ignored."""
        if not (0 < predicted_s < math.inf and 0 < measured_s < math.inf):
            return
        ratio = min(max(measured_s / predicted_s, 1 / _RATIO_MAX), _RATIO_MAX)
        self._recent = [*self._recent[-2:], math.log(ratio)]
        self.observations += 1
        if len(self._recent) < 3:
            return
        value = sorted(self._recent)[1]
        weight = max(self.weight, 1 / (self.observations - 2))
        self._log_residual += self.weight * (abs(value - self._log_factor) - self._log_residual)
        moved = self._log_factor + weight * (value - self._log_factor)
        self._log_factor = min(max(moved, _LOG_MIN), _LOG_MAX)
