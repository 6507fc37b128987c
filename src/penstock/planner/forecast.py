"""Forecasts of a series of equally spaced values, such as arrivals a second: two methods, chosen by their errors so far."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol


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


class HoltWinters:
    """Exponential smoothing of level, trend and factors of a season.

    The season is a factor, as demand swings in proportion to its size. Without a period, or before the second period
    begins, all factors are 1. Source: Winters (1960); the damped trend is Gardner and McKenzie (1985).
    """

    def __init__(
        self,
        period: int = 0,
        *,
        level: float = 0.3,
        trend: float = 0.1,
        season: float = 0.2,
        damping: float = 0.98,
    ) -> None:
        """Begin without values.

        Args:
            period: intervals of a season, such as those of a day; 0 is no season.
            level: weight of the newest value, 0 to 1; likewise `trend` and `season`.
            damping: each further step ahead adds so much of the trend of the step before, 0 to 1.
        """
        if period < 0 or period == 1:
            raise ValueError(f"period is {period}, expected 0 or at least 2 intervals")
        self.name = f"holt-winters {period}" if period else "holt"
        self._period = period
        self._weights = level, trend, season
        self._damping = damping
        self._level: float | None = None
        self._trend = 0.0
        self._first: list[float] = []
        self._factors: list[float] = []
        self._at = 0

    def observe(self, value: float) -> None:
        if self._period and not self._factors:
            self._first.append(value)
            if len(self._first) == self._period:
                self._begin_seasons()
                return
        factor = self._factor(0)
        plain = value / factor
        level_weight, trend_weight, season_weight = self._weights
        if self._level is None:
            self._level = plain
        else:
            before = self._level
            expected = before + self._damping * self._trend
            self._level = max(0.0, expected + level_weight * (plain - expected))
            self._trend = (1 - trend_weight) * self._damping * self._trend + trend_weight * (
                self._level - before
            )
        if self._factors and self._level > 0:
            self._factors[self._at] = (1 - season_weight) * factor + season_weight * value / self._level
        if self._factors:
            self._at = (self._at + 1) % self._period

    def predict(self, steps: int) -> float | None:
        if self._level is None:
            return None
        damped = sum(self._damping**step for step in range(1, min(steps, 200) + 1))
        return max(0.0, self._level + damped * self._trend) * self._factor(steps - 1)

    def _factor(self, ahead: int) -> float:
        return max(self._factors[(self._at + ahead) % self._period], 1e-3) if self._factors else 1.0

    def _begin_seasons(self) -> None:
        """Take the first period's values over their mean as factors, smoothed over a fiftieth of the period."""
        mean = sum(self._first) / self._period
        reach = self._period // 50
        if mean <= 0:
            self._factors = [1.0] * self._period
        else:
            width = 2 * reach + 1
            self._factors = [
                sum(self._first[(at + off) % self._period] for off in range(-reach, reach + 1)) / width / mean
                for at in range(self._period)
            ]
        self._first = []
        self._level, self._trend, self._at = mean, 0.0, 0


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
    methods: list[Forecaster] = [Ewma(0.3), HoltWinters()]
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


_REPLAYED = 2000
"""Values that a new horizon is learned from; two seasons if that is more."""
_REPLAYED_MAX = 20_000
"""More would keep a core busy for a second."""


class Series:
    """One series of values over equal intervals. One task owns it."""

    def __init__(self, name: str, *, interval_s: float, horizon_s: float, season_s: float | None) -> None:
        """Begin without values.

        Args:
            name: the series' name in records, with its unit.
            interval_s: length of an interval.
            horizon_s: how far ahead `forecast` looks.
            season_s: seconds after which the series repeats itself; None for no season.
        """
        self.name = name
        self._interval_s = interval_s
        self._period = round(season_s / interval_s) if season_s else 0
        replayed = max(_REPLAYED, min(2 * self._period, _REPLAYED_MAX))
        self._history: deque[float] = deque(maxlen=replayed)
        self._steps = math.ceil(horizon_s / interval_s)
        self._selected = self._make()

    def take(self, value: float) -> None:
        """Take the next value."""
        self._history.append(value)
        self._selected.observe(value)

    def look_ahead(self, horizon_s: float) -> None:
        """Look `horizon_s` ahead from now on; the errors at that horizon are found from the values so far."""
        steps = math.ceil(horizon_s / self._interval_s)
        if steps == self._steps:
            return
        self._steps = steps
        self._selected = self._make()
        for value in self._history:
            self._selected.observe(value)

    def forecast(self) -> Forecast | None:
        """Give the largest expected value up to the horizon; None before the first value."""
        return self._selected.forecast()

    def _make(self) -> SelectedForecast:
        return SelectedForecast(standard_methods(self._period), horizon=self._steps)
