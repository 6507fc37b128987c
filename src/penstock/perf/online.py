"""Online correction: a model's prices times what workers report, clamped, and distrusted where it is off.

The factor is an exponential average of log(measured / predicted), so that it cannot oscillate: it moves
monotonically towards a constant truth. Single outliers are cut off by a running median of three.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.core.types import Tier
from penstock.perf.latency import LatencyModel, Link

FACTOR_MIN, FACTOR_MAX = 0.25, 4.0


@dataclass(slots=True)
class Correction:
    """How much slower (above 1) or faster a worker is than predicted. One task owns it.

    weight: of each new step; 0.25 reaches 99 % of a sudden change in 16 steps.
    residual_max: average distance of a step from the corrected price, as a factor, past which the model is not trusted.
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
        """Whether corrected prices are close enough to decide by."""
        return self._log_residual <= math.log(self.residual_max)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Learn from one step; `predicted_s` is the uncorrected price. Steps without a price or duration are ignored."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        self._recent = [*self._recent[-2:], math.log(measured_s / predicted_s)]
        value = sorted(self._recent)[len(self._recent) // 2]
        weight = max(self.weight, 1 / (self.observations + 1))
        self.observations += 1
        self._log_residual += self.weight * (abs(value - self._log_factor) - self._log_residual)
        moved = self._log_factor + weight * (value - self._log_factor)
        self._log_factor = min(max(moved, math.log(FACTOR_MIN)), math.log(FACTOR_MAX))


@dataclass(slots=True)
class CorrectedModel:
    """A `LatencyModel` that follows one worker: prefill and decode are corrected apart."""

    model: LatencyModel
    prefill: Correction = field(default_factory=Correction)
    decode: Correction = field(default_factory=Correction)

    @property
    def trusted(self) -> bool:
        return self.prefill.trusted and self.decode.trusted

    @property
    def kv_bytes_per_token(self) -> float:
        return self.model.kv_bytes_per_token

    @property
    def kv_capacity_tokens(self) -> int:
        return self.model.kv_capacity_tokens

    def observe_step(
        self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int, measured_s: float
    ) -> None:
        """Learn from a step's duration; a step of both kinds teaches the kind that dominates it."""
        predicted = self.model.mixed_step_s(chunks, batch, context_tokens)
        prefill = self.model.prefill_batch_s(chunks) if chunks else 0.0
        (self.prefill if prefill > predicted / 2 else self.decode).observe(predicted, measured_s)

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        return self.prefill.factor * self.model.prefill_s(new_tokens, cached_tokens)

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.prefill.factor * self.model.prefill_batch_s(chunks)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.decode.factor * self.model.decode_step_s(batch, context_tokens)

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        whole = self.model.mixed_step_s(chunks, batch, context_tokens)
        prefill = min(whole, self.model.prefill_batch_s(chunks)) if chunks else 0.0
        return self.prefill.factor * prefill + self.decode.factor * (whole - prefill)

    def transfer_s(self, num_bytes: float, link: Link) -> float:
        return self.model.transfer_s(num_bytes, link)

    def onboard_s(self, num_bytes: float, tier: Tier) -> float:
        return self.model.onboard_s(num_bytes, tier)
