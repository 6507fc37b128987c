"""How much longer a latency is, at the SLO's percentile, than the latency model predicts for the load that there is."""

import math

_WEIGHT = 0.05
"""Of one interval: 99th percentiles of some hundred requests differ by a fifth from interval to interval."""
_FEW = 50
"""Fewer values say nothing of a percentile."""
_IDLE_SHARE = 0.4
"""Latencies predicted below this share of their target are those of almost idle workers: that ratio is another one."""
_LOWEST, _HIGHEST = 0.8, 2.0
_STEP = 1.05
"""The factor changes in steps of 5 %, so that equal loads give equal decisions."""


class LatencyFactor:
    """Measured over predicted latency. One task owns it.

    Predictions take requests and workers as equal. Short streams see more of a moment's crowd, and of a prompt beside them, than
    the mean one.
    """

    def __init__(self, guess: float = 1.0) -> None:
        """Begin with a guess, above 0."""
        self.value = guess
        """Measured over predicted, within 5 %."""
        self._log = math.log(guess)

    def learn(self, measured_s: float | None, count: int, predicted_s: float | None, target_s: float) -> None:
        """Compare one interval with its prediction.

        Args:
            measured_s: the latency at the SLO's percentile; None of no request.
            count: requests that it is of.
            predicted_s: uncorrected prediction at their rate; None beyond what the workers can serve.
            target_s: the latency's target.
        """
        if measured_s is None or predicted_s is None or count < _FEW:
            return
        if measured_s <= 0 or predicted_s < _IDLE_SHARE * target_s:
            return
        ratio = min(max(measured_s / predicted_s, _LOWEST), _HIGHEST)
        self._log += _WEIGHT * (math.log(ratio) - self._log)
        if not 1 / _STEP < math.exp(self._log) / self.value < _STEP:
            self.value = math.exp(self._log)
