"""Speeds measured while serving: what predictions of load and compute times rest on."""

import asyncio
from collections.abc import Callable

_WEIGHT = 0.2
"""Share of the latest measurement; older ones fade with it."""


class MeasuredSpeed:
    """Seconds for each unit of work, a mean in which older measurements fade. Not thread-safe."""

    def __init__(self, *, half_life_s: float | None = None, clock: Callable[[], float] | None = None) -> None:
        """Begin without a measurement.

        Args:
            half_life_s: predictions are halved in so much time without a measurement, so that what was slow once is tried
                again; None keeps them.
            clock: seconds; None is the event loop's.
        """
        self._units = self._seconds = 0.0
        self._half_life_s = half_life_s
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._measured_at_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._units > 0

    def measure(self, units: float, seconds: float) -> None:
        """Add a measurement; one of more units weighs more."""
        if units > 0 and seconds >= 0:
            self._units = self._units * (1 - _WEIGHT) + units * _WEIGHT
            self._seconds = self._seconds * (1 - _WEIGHT) + seconds * _WEIGHT
            if self._half_life_s is not None:
                self._measured_at_s = self._clock()

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
"""Of predictions of tiers: a load that was slow once, and so is never chosen, is tried again after some minutes."""
