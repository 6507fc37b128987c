"""Forecast: things stay as they are."""


class Constant:
    """The last value, whatever the horizon."""

    name = "constant"

    def __init__(self) -> None:
        self._last: float | None = None

    def observe(self, value: float) -> None:
        self._last = value

    def predict(self, steps: int) -> float | None:  # noqa: ARG002
        return self._last
