"""How much slower warm workers of a role step than their latency model says."""

from collections.abc import Iterable

from penstock.perf.online import Correction
from penstock.perf.search.pool import PoolModel
from penstock.planner.observe.observation import WorkerView

_STEPS_MIN = 16
_STEP = 1.05
"""The factor changes in steps of 5 %: predictions are no better, and equal factors give equal decisions."""


class StepFactor:
    """One role's factor. One task owns it."""

    def __init__(self, model: PoolModel) -> None:
        """Trust the model so far.

        Args:
            model: latency model of one worker, uncorrected.
        """
        self.value = 1.0
        """Measured over predicted step time, within 5 %."""
        self._model = model
        self._correction = Correction()

    @property
    def is_trusted(self) -> bool:
        """Whether steps are within a factor of two of the corrected model."""
        return self._correction.trusted

    def learn(self, workers: Iterable[WorkerView], seconds: float) -> None:
        """Compare the steps of warm workers over the last `seconds` with the model."""
        for worker in workers:
            mean_s = worker.step_s.mean
            if mean_s is None or worker.step_s.count < _STEPS_MIN:
                continue
            new = round(worker.prefilled_tokens_per_s * seconds / worker.step_s.count)
            batch, context = worker.running_requests, worker.context_tokens
            if new:
                predicted_s = self._model.mixed_step_s([(new, 0)], batch, context)
            elif batch:
                predicted_s = self._model.decode_step_s(batch, context)
            else:
                continue
            self._correction.observe(predicted_s, mean_s)
        moved = self._correction.factor / self.value
        if not 1 / _STEP < moved < _STEP:
            self.value = self._correction.factor
