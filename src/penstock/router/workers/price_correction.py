"""Price correction: the factor between a worker's published prices and its measured step times.

While a batch only decodes, two reports give the number of steps between them and their time: this time over the predicted
time is one observation. Reports with a prefill in between are skipped. An idle worker shows nothing, so its factor is forgotten.
"""

from dataclasses import dataclass, field

from penstock.core.types.instances import Prices
from penstock.core.types.load import WorkerLoad
from penstock.perf.latency import Correction

_STEPS_MIN = 8
"""A report comes at any moment of a step, so eight steps are wrong by an eighth at most."""
FORGOTTEN_S = 30.0
"""An idle worker's factor is forgotten after this long, and the worker is tried again."""
_MOVE_MIN = 0.02
"""Smaller changes are not applied, as prices are good to a few percent."""


@dataclass(slots=True)
class PriceCorrection:
    """One worker's correction. One event loop owns it.

    `factor` multiplies the prices. It follows what was learned in changes of more than 2 %.
    """

    prices: Prices | None
    factor: float = 1.0
    _correction: Correction = field(default_factory=Correction)
    _last: WorkerLoad | None = None
    _last_s: float = 0.0

    @property
    def trusted(self) -> bool:
        """Whether steps are within a factor of two of the corrected prices."""
        return self._correction.trusted

    def forget_if_idle(self, now_s: float) -> bool:
        """Go back to the published prices of a worker that was idle for `FORGOTTEN_S`.

        Returns:
            Whether `factor` has changed.
        """
        last = self._last
        if last is None or last.running_requests or now_s - self._last_s < FORGOTTEN_S:
            return False
        self._correction = Correction()
        was, self.factor = self.factor, 1.0
        return was != 1.0

    def report(self, load: WorkerLoad, now_s: float) -> bool:
        """Learn from a load report that has just arrived.

        Returns:
            Whether `factor` has changed.
        """
        prices, last, last_s = self.prices, self._last, self._last_s
        if prices is None:
            return False
        self._last, self._last_s = load, now_s
        if last is None or not last.running_requests or not load.running_requests:
            return False
        steps = load.steps - last.steps
        if steps < _STEPS_MIN or load.prefilled_tokens != last.prefilled_tokens:
            return False
        context = (last.context_tokens + load.context_tokens) / 2
        predicted_s = steps * (prices.decode_step_s + context * prices.decode_token_s)
        predicted_s += (load.generated_tokens - last.generated_tokens) * prices.decode_sequence_s
        self._correction.observe(predicted_s, now_s - last_s)
        learned = self._correction.factor
        if abs(learned / self.factor - 1) <= _MOVE_MIN:
            return False
        self.factor = learned
        return True
