"""Speeds measured while serving: what predictions of load and compute times rest on."""

_WEIGHT = 0.2
"""Share of the latest measurement; older ones fade with it."""


class MeasuredSpeed:
    """Seconds for each unit of work, a mean in which older measurements fade. Not thread-safe."""

    def __init__(self) -> None:
        """Begin without a measurement."""
        self._units = self._seconds = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._units > 0

    def measure(self, units: float, seconds: float) -> None:
        """Add a measurement; one of more units weighs more."""
        if units > 0 and seconds >= 0:
            self._units = self._units * (1 - _WEIGHT) + units * _WEIGHT
            self._seconds = self._seconds * (1 - _WEIGHT) + seconds * _WEIGHT

    def seconds(self, units: float) -> float:
        """Predict the time of so many units; 0 before the first measurement."""
        return units * self._seconds / self._units if self._units else 0.0
