"""Speeds measured while serving, from which load and compute times are predicted."""

import asyncio
import math
from collections.abc import Callable

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


LOAD_HALF_LIFE_S = 30.0
"""Half-life of tiers' predictions: a tier whose loads were slow is tried again after some minutes."""
