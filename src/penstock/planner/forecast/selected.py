"""The method that predicted best so far, and how far off it was."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist

from penstock.planner.forecast.autoregressive import Autoregressive
from penstock.planner.forecast.constant import Constant
from penstock.planner.forecast.ewma import Ewma
from penstock.planner.forecast.forecast import Forecast
from penstock.planner.forecast.forecaster import Forecaster
from penstock.planner.forecast.holt_winters import HoltWinters
from penstock.planner.forecast.kalman import Kalman

_VALUES_MIN = 20
"""Values before a band is taken from errors."""
_COLD_HIGH, _COLD_VALUES = 1.5, 3
"""Before that, the upper edge is the largest of the last so many values times this: traffic that has ended is not expected."""
_PRIOR, _PRIOR_HORIZON, _PRIOR_WEIGHT = 0.15, 7, 4.0
"""Relative error that a band begins with, at a horizon of so many intervals or fewer, and how many horizons it weighs as: a few quiet
or loud minutes say little. Further ahead it grows as the root of the horizon, as the errors of a random walk do."""
_HALF_LIFE, _HALF_LIFE_HORIZONS = 60, 8
"""Intervals after which an error counts half; so many horizons if that is longer."""
_RISE_MAX = 1.0
"""An error counts as twice the prediction at most: a jump from nothing says little of the next one."""
_SWITCH = 0.7
"""Another method than the first is chosen while its error is below this share of the first one's: what looks a little better over
some minutes is mostly chance."""
_RATED_MIN = 40
"""Comparisons before another method than the first may be chosen."""
_STAY = 1.1
"""A chosen method stays until its error is so much above that share, so that methods do not alternate."""


def standard_methods(period: int = 0) -> list[Forecaster]:
    """Make one of each method, the one to begin with first; `period` is the season's length in intervals, 0 for none."""
    methods: list[Forecaster] = [Ewma(0.3), Constant(), HoltWinters(), Autoregressive(), Kalman()]
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
        band: float = 0.7,
    ) -> None:
        """Begin without values.

        Args:
            methods: at least one; the first is used until another is clearly better.
            horizon: intervals ahead for which capacity is decided now, such as a worker's start over the interval.
            band: share of values that shall lie between the band's edges, 0 to 1.
        """
        if not methods or horizon < 1 or not 0 < band < 1:
            raise ValueError(
                f"{len(methods)} methods, horizon {horizon}, band {band}: expected at least one method, a horizon of at least"
                " 1 and a band between 0 and 1"
            )
        self._horizon = horizon
        self._deviations = NormalDist().inv_cdf((1 + band) / 2)
        self._decay = 0.5 ** (1 / max(_HALF_LIFE, _HALF_LIFE_HORIZONS * horizon))
        self._tracks = [_Track(method, horizon) for method in methods]
        self._chosen = self._tracks[0]
        self._last: deque[float] = deque(maxlen=_COLD_VALUES)
        self._seen = 0

    def observe(self, value: float) -> None:
        """Take the next value; values below 0, infinite ones and NaN are ignored."""
        if not (math.isfinite(value) and value >= 0):
            return
        self._seen += 1
        self._last.append(value)
        for track in self._tracks:
            track.observe(value, self._decay)
        first = self._tracks[0]
        rated = [track for track in self._tracks if track.errors >= _RATED_MIN]
        best = min(rated, key=lambda track: track.mean_error, default=first)
        most = _SWITCH * first.mean_error
        if self._chosen is not first and self._chosen.mean_error > _STAY * most:
            self._chosen = first
        if best.mean_error < most and best.mean_error < self._chosen.mean_error / _STAY:
            self._chosen = best

    def forecast(self) -> Forecast | None:
        """Give the largest expected value up to the horizon; None before the first value."""
        track = self._chosen
        mean = track.peak(self._horizon)
        if mean is None:
            return None
        if self._seen < _VALUES_MIN:
            high = max(mean, _COLD_HIGH * max(self._last))
            return Forecast(mean=mean, low=0.0, high=high, method=track.method.name, is_cold=True)
        unit = self._deviations * max(mean, track.scale)
        return Forecast(
            mean=mean,
            low=max(0.0, mean - unit * track.down),
            high=mean + unit * track.up,
            method=track.method.name,
            mean_error=track.mean_error if track.errors else None,
        )


class _Track:
    """One method, its open predictions and its errors."""

    def __init__(self, method: Forecaster, horizon: int) -> None:
        self.method = method
        self.errors = 0
        """Predictions compared so far."""
        self.scale = 0.0
        """A slowly falling share of the largest values, so that errors near 0 are not divided by nothing."""
        self._open: deque[float | None] = deque(maxlen=horizon)
        self._horizon = horizon
        self._error_sum = 0.0
        self._weight_sum = 0.0
        self._squares = _Squares(horizon), _Squares(horizon)
        """Of errors above and below the prediction."""

    @property
    def up(self) -> float:
        """Deviation of the values above their predictions, over these, newer ones weighing more."""
        return self._squares[0].deviation

    @property
    def down(self) -> float:
        """Likewise of those below."""
        return self._squares[1].deviation

    @property
    def mean_error(self) -> float:
        """Mean absolute error, newer ones weighing more."""
        return self._error_sum / self._weight_sum if self._weight_sum else math.inf

    def observe(self, value: float, decay: float) -> None:
        self.scale = max(0.1 * value, decay * self.scale)
        if len(self._open) == self._horizon and (predicted := self._open[0]) is not None:
            self._error_sum = decay * self._error_sum + abs(value - predicted)
            self._weight_sum = decay * self._weight_sum + 1
            relative = min((value - predicted) / max(predicted, self.scale, 1e-9), _RISE_MAX)
            self._squares[0].take(max(0.0, relative), decay)
            self._squares[1].take(max(0.0, -relative), decay)
            self.errors += 1
        self.method.observe(value)
        self._open.append(self.method.predict(self._horizon))

    def peak(self, horizon: int) -> float | None:
        """Give the largest prediction of the intervals ahead."""
        stride = max(1, horizon // 16)
        ahead = {*range(1, horizon + 1, stride), horizon}
        values = [value for steps in ahead if (value := self.method.predict(steps)) is not None]
        return max(values, default=None)


class _Squares:
    """One side's squared errors. Predictions made within one horizon are all wrong by the same jump, so they count as one."""

    def __init__(self, horizon: int) -> None:
        self._weight = 1 / horizon
        self._sum = _PRIOR**2 * max(1.0, horizon / _PRIOR_HORIZON) * _PRIOR_WEIGHT / 2
        self._weights = _PRIOR_WEIGHT

    @property
    def deviation(self) -> float:
        """Standard deviation, if the other side's errors were as large."""
        return math.sqrt(2 * self._sum / self._weights)

    def take(self, error: float, decay: float) -> None:
        self._sum = decay * self._sum + self._weight * error**2
        self._weights = decay * self._weights + self._weight
