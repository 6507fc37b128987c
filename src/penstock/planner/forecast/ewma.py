"""Forecast: an exponentially weighted mean."""


class Ewma:
    """The mean of past values, each weighing `1 - weight` times as much as the one after it."""

    def __init__(self, weight: float = 0.2) -> None:
        """Begin without values; `weight` of the newest is above 0 and at most 1."""
        if not 0 < weight <= 1:
            raise ValueError(f"weight is {weight}, expected above 0 and at most 1")
        self.name = f"ewma {weight:g}"
        self._weight = weight
        self._mean: float | None = None

    def observe(self, value: float) -> None:
        self._mean = value if self._mean is None else self._mean + self._weight * (value - self._mean)

    def predict(self, steps: int) -> float | None:  # noqa: ARG002
        return self._mean
