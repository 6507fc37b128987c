"""Speeds measured while serving, from which load and compute times are predicted."""

import asyncio
import math
from collections.abc import Callable

from penstock.perf.least_squares import fit_non_negative

_WEIGHT = 0.2
"""Weight of the latest measurement in the mean; that of each older one shrinks by 1 - `_WEIGHT`."""


class MeasuredSpeed:
    """Seconds per unit of work: an exponentially weighted mean of measurements. Not thread-safe."""

    def __init__(self, *, half_life_s: float | None = None, clock: Callable[[], float] | None = None) -> None:
        """Begin without a measurement.

        Args:
            half_life_s: after so many seconds without a measurement the prediction is half, so that a tier that was slow once
                is tried again; None or infinite: predictions do not change.
            clock: returns seconds; None is the event loop's.
        """
        self._units = self._seconds = 0.0
        self._half_life_s = half_life_s
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._measured_at_s = 0.0
        self._busy_until_s = -math.inf

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._units > 0

    @property
    def age_s(self) -> float:
        """Seconds since the last measurement; infinite before the first. For speeds with a half-life."""
        return self._clock() - self._measured_at_s if self._units else math.inf

    def measure(self, units: float, seconds: float) -> None:
        """Add a measurement; one of more units weighs more."""
        if units > 0 and seconds >= 0:
            self._units = self._units * (1 - _WEIGHT) + units * _WEIGHT
            self._seconds = self._seconds * (1 - _WEIGHT) + seconds * _WEIGHT
            if self._half_life_s is not None:
                self._measured_at_s = self._clock()

    def measure_overlapping(self, units: float, begun_s: float, ended_s: float) -> None:
        """Add work that other work may have overlapped: it took the time since that ended, where this is later than its own begin.

        So what all of it took together counts once. To be called when each of them ends.
        """
        self.measure(units, max(ended_s - max(begun_s, self._busy_until_s), 0.0))
        self._busy_until_s = max(self._busy_until_s, ended_s)

    def seconds(self, units: float) -> float:
        """Predict the time of so many units; 0 before the first measurement."""
        if not self._units:
            return 0.0
        predicted_s = units * self._seconds / self._units
        if self._half_life_s is None:
            return predicted_s
        age_s = self._clock() - self._measured_at_s
        return float(predicted_s * 0.5 ** (age_s / self._half_life_s))


_RIDGE = (0.0025, 0.0025, 0.0025, 0.0)
"""What no step tells apart is charged to the prompt tokens, as where every step has the same prompt and decode rows."""
_STEPS_HALF, _WEIGHT_MIN = 16, 0.001
"""Steps of its kind after which a size weighs half, and the least that it weighs: one slow step long ago, as the first prompt's, says
little against those of now, but a quick one still shows that a price is too high."""
_REFIT_SHARE, _REFIT_STEPS = 8, 16
"""Prices are fitted again after an eighth more steps, at most 16."""


class MeasuredPrefill:
    """Seconds that each prompt token adds to a step, fitted to the steps of an engine. Not thread-safe.

    A step takes a base, and a time for each decode row, for each token of these rows' context, and for each prompt token. Steps of
    about one size are kept as one mean, so that the price of steps that have become rare stays known.
    """

    def __init__(self) -> None:
        self._by_size: dict[tuple[int, int], tuple[float, ...]] = {}
        """By binary orders of prompt tokens and decode rows: decode rows, their context, prompt tokens, seconds; means."""
        self._seen_at: dict[tuple[int, int], int] = {}
        """The last step of each size, as `_steps` counts them."""
        self._steps = [0, 0]
        """Steps without a prompt, and with one."""
        self._unfitted = 0
        self._token_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether prompt tokens were measured to take time."""
        return self.seconds(1) > 0

    def measure(
        self, prompt_tokens: int, seconds: float, *, decode_rows: int = 0, context_tokens: int = 0
    ) -> None:
        """Add a step.

        Args:
            prompt_tokens: that it computed.
            seconds: that it took.
            decode_rows: sequences of which it computed the next token, and tokens drafted after it.
            context_tokens: the sum of these sequences' lengths.
        """
        if seconds <= 0 or not (prompt_tokens or decode_rows):
            return
        size, kind = (prompt_tokens.bit_length(), decode_rows.bit_length()), int(prompt_tokens > 0)
        step = (decode_rows, context_tokens, prompt_tokens, seconds)
        known = self._by_size.get(size, step)
        self._by_size[size] = tuple(old + _WEIGHT * (new - old) for old, new in zip(known, step, strict=True))
        self._steps[kind] += 1
        self._seen_at[size] = self._steps[kind]
        self._unfitted += 1

    def seconds(self, prompt_tokens: float) -> float:
        """Predict the time that so many prompt tokens add to steps; 0 before the first measurement."""
        if self._unfitted * _REFIT_SHARE >= min(sum(self._steps), _REFIT_SHARE * _REFIT_STEPS) > 0:
            self._unfitted = 0
            self._token_s = self._fit()
        return prompt_tokens * self._token_s

    def _fit(self) -> float:
        """Give the seconds of a prompt token."""
        rows, seconds, weights = [], [], []
        for size, (*terms, step_s) in self._by_size.items():
            age = self._steps[size[0] > 0] - self._seen_at[size]
            rows.append((1.0, *terms))
            seconds.append(step_s)
            weights.append(max(_WEIGHT_MIN, 0.5 ** (age / _STEPS_HALF)))
        return fit_non_negative(rows, seconds, weights=weights, ridge=_RIDGE)[3]


LOAD_HALF_LIFE_S = 30.0
"""Half-life of tiers' predictions: a tier whose loads were slow is tried again after some minutes."""
