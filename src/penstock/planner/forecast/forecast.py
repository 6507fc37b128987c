"""What is expected of the next intervals."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The largest value of the next intervals up to the horizon, with a band.

    Attributes:
        mean: what the method predicts.
        low: about one deviation of the method's errors below the mean; `high` is as much above it.
        method: name of the method.
        mean_error: mean absolute error of that method, over the last values; None before the first comparison.
        is_cold: too few values to know the method's errors; the band is a guess, on the safe side.
    """

    mean: float
    low: float
    high: float
    method: str
    mean_error: float | None = None
    is_cold: bool = False
