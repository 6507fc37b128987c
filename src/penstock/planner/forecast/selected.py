"""The method that predicted best so far, and how far off it was."""

import math
from collections import deque
from collections.abc import Sequence

from penstock.planner.forecast.autoregressive import Autoregressive
from penstock.planner.forecast.constant import Constant
from penstock.planner.forecast.ewma import Ewma
from penstock.planner.forecast.forecast import Forecast
from penstock.planner.forecast.forecaster import Forecaster
from penstock.planner.forecast.holt_winters import HoltWinters
from penstock.planner.forecast.kalman import Kalman

_ERRORS_MIN = 12
"""Comparisons before a band is taken from errors."""
_COLD_HIGH = 1.5
"""Before that, the upper edge is the largest value so far times this."""
_RISE_MAX = 1.0
"""An error counts as twice the prediction at most: a jump from nothing says little of the next one."""
_SWITCH = 0.95
"""Another method is chosen once its error is below this share of the chosen one's, so that methods do not alternate."""


def standard_methods(period: int = 0) -> list[Forecaster]:
    """Make one of each method; `period` is the season's length in intervals, 0 for none."""
    methods: list[Forecaster] = [Constant(), Ewma(0.2), HoltWinters(), Autoregressive(), Kalman()]
    if period:
        methods.append(HoltWinters(period))
    return methods


class SelectedForecast:
    """Runs several methods on one series, and compares what each predicted with what came."""

    def __init__(
        self,
        methods: Sequence[Forecaster],
        *,
        horizon: int,
        band: float = 0.8,
        half_life: int = 40,
        memory: int = 200,
    ) -> None:
        """Begin without values.

        Args:
            methods: at least one; the first is used until errors say otherwise.
            horizon: intervals ahead for which capacity is decided now, such as a worker's start over the interval.
            band: share of values that shall lie between the band's edges, 0 to 1.
            half_life: intervals after which an error counts half.
            memory: errors that the band is taken from.
        """
        if not methods or horizon < 1 or not 0 < band < 1:
            raise ValueError(
                f"{len(methods)} methods, horizon {horizon}, band {band}: expected at least one method, a horizon of at least"
                " 1 and a band between 0 and 1"
            )
        self._horizon = horizon
        self._edges = (1 - band) / 2, (1 + band) / 2
        self._decay = 0.5 ** (1 / half_life)
        self._tracks = [_Track(method, horizon, memory) for method in methods]
        self._chosen = self._tracks[0]
        self._largest = 0.0
        self._seen = 0

    def observe(self, value: float) -> None:
        """Take the next value; values below 0, infinite ones and NaN are ignored."""
        if not (math.isfinite(value) and value >= 0):
            return
        self._seen += 1
        self._largest = max(value, self._decay * self._largest)
        for track in self._tracks:
            track.observe(value, self._decay)
        rated = [track for track in self._tracks if len(track.errors) >= _ERRORS_MIN]
        if rated:
            best = min(rated, key=lambda track: track.mean_error)
            if self._chosen not in rated or best.mean_error < _SWITCH * self._chosen.mean_error:
                self._chosen = best

    def forecast(self) -> Forecast | None:
        """Give the largest expected value up to the horizon; None before the first value."""
        track = self._chosen
        mean = track.peak(self._horizon)
        if mean is None:
            return None
        if len(track.errors) < _ERRORS_MIN:
            high = max(mean, _COLD_HIGH * self._largest)
            return Forecast(mean=mean, low=0.0, high=high, method=track.method.name, is_cold=True)
        ordered = sorted(track.errors)
        low, high = (ordered[min(int(edge * len(ordered)), len(ordered) - 1)] for edge in self._edges)
        scale = max(mean, track.scale)
        return Forecast(
            mean=mean,
            low=max(0.0, min(mean, mean + low * scale)),
            high=max(mean, mean + high * scale),
            method=track.method.name,
            mean_error=track.mean_error,
        )


class _Track:
    """One method, its open predictions and its errors."""

    def __init__(self, method: Forecaster, horizon: int, memory: int) -> None:
        self.method = method
        self.errors: deque[float] = deque(maxlen=memory)
        """Value less prediction, over the larger of prediction and scale: noise grows with demand."""
        self.scale = 0.0
        """A slowly falling share of the largest values, so that errors near 0 are not divided by nothing."""
        self._open: deque[float | None] = deque(maxlen=horizon)
        self._horizon = horizon
        self._error_sum = 0.0
        self._weight_sum = 0.0

    @property
    def mean_error(self) -> float:
        """Mean absolute error, newer ones weighing more."""
        return self._error_sum / self._weight_sum if self._weight_sum else math.inf

    def observe(self, value: float, decay: float) -> None:
        self.scale = max(0.1 * value, decay * self.scale)
        if len(self._open) == self._horizon and (predicted := self._open[0]) is not None:
            self._error_sum = decay * self._error_sum + abs(value - predicted)
            self._weight_sum = decay * self._weight_sum + 1
            self.errors.append(min((value - predicted) / max(predicted, self.scale, 1e-9), _RISE_MAX))
        self.method.observe(value)
        self._open.append(self.method.predict(self._horizon))

    def peak(self, horizon: int) -> float | None:
        """Give the largest prediction of the intervals ahead."""
        stride = max(1, horizon // 16)
        ahead = {*range(1, horizon + 1, stride), horizon}
        values = [value for steps in ahead if (value := self.method.predict(steps)) is not None]
        return max(values, default=None)
