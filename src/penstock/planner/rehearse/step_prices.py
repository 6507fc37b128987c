"""Step times of a latency model, each worked out once for steps that are nearly alike."""

import math

from penstock.perf.search.pool import PoolModel

_PER_DOUBLING = 12
"""Steps within 6 % in tokens, sequences and context have one price."""
_KNOWN_MAX = 1 << 16


class StepPrices:
    """One role's step times. One task owns it."""

    def __init__(self, model: PoolModel) -> None:
        """Price nothing yet.

        Args:
            model: latency model of one worker, corrected by what was measured.
        """
        self._model = model
        self._known: dict[tuple[int, int, int, int], float] = {}

    def step_s(self, chunk: int, before: int, batch: int, context: int) -> float:
        """Give the seconds of a step.

        Args:
            chunk: prompt tokens that it computes; 0 for decode alone.
            before: tokens of the prompt before them.
            batch: sequences that decode.
            context: their tokens together.
        """
        key = _rounded(chunk), _rounded(before), _rounded(batch), _rounded(context)
        found = self._known.get(key)
        if found is None:
            if chunk:
                found = self._model.mixed_step_s([(chunk, before)], batch, context)
            else:
                found = self._model.decode_step_s(batch, context)
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[key] = found
        return found


def _rounded(count: int) -> int:
    return 0 if count <= 0 else 1 + round(math.log2(count) * _PER_DOUBLING)
