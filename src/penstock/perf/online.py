"""Online correction of a latency model: a factor from measured step times, and whether to trust it.

The factor is an exponential average of log(measured / predicted). It cannot oscillate: it moves monotonically towards a
constant truth. A running median of three removes single outliers, so the first two observations change nothing.
"""

import math
from dataclasses import dataclass, field

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
