"""The interface of forecasting methods."""

from typing import Protocol


class Forecaster(Protocol):
    """Predicts a series of values of at least 0, each taken over an interval of the same length.

    Pure: equal series give equal predictions. Time and memory of a value are bounded.
    """

    @property
    def name(self) -> str:
        """The method with its period where it has one, such as `holt-winters 5760`."""
        ...

    def observe(self, value: float) -> None:
        """Take the next value."""
        ...

    def predict(self, steps: int) -> float | None:
        """Give the mean of the value `steps` (at least 1) intervals ahead; None while there are too few values."""
        ...
