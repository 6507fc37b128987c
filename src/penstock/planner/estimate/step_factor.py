"""How much slower warm workers of a role step than their latency model says."""

from collections.abc import Iterable

from penstock.perf.online import Correction
from penstock.perf.search.pool import PoolModel
from penstock.planner.observe.observation import WorkerView

_STEPS_MIN = 16
_WEIGHT = 0.03
"""Of one worker's steps in one round: their batch is known at its end only, so single ones are some percent off."""
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
        self._correction = Correction(weight=_WEIGHT)

    @property
    def is_trusted(self) -> bool:
        """Whether steps are within a factor of two of the corrected model."""
        return self._correction.trusted

    def learn(self, workers: Iterable[WorkerView], seconds: float, prompt_tokens: int = 1) -> None:
        """Compare the steps of warm workers over the last `seconds` with the model.

        Args:
            workers: of one role.
            seconds: observed time.
            prompt_tokens: mean new tokens of a prompt. Few steps have whole prompts and most have none, which takes longer than
                as many steps with a few tokens each.
        """
        for worker in workers:
            mean_s = worker.step_s.mean
            if mean_s is None or worker.step_s.count < _STEPS_MIN:
                continue
            new = round(worker.prefilled_tokens_per_s * seconds / worker.step_s.count)
            batch, context = worker.running_requests, worker.context_tokens
            if not (new or batch):
                continue
            chunk = max(new, prompt_tokens) if batch else new
            mixed = new / chunk if chunk else 0.0
            predicted_s = mixed * self._model.mixed_step_s([(chunk, 0)], batch, context) if mixed else 0.0
            if mixed < 1:
                predicted_s += (1 - mixed) * self._model.decode_step_s(batch, context)
            self._correction.observe(predicted_s, mean_s)
        moved = self._correction.factor / self.value
        if not 1 / _STEP < moved < _STEP:
            self.value = self._correction.factor
