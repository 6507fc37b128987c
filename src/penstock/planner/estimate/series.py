"""A forecast series that can look further ahead later on."""

import math
from collections import deque

from penstock.planner.forecast.forecast import Forecast
from penstock.planner.forecast.selected import SelectedForecast, standard_methods

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
