"""Forecast: level, damped trend and season."""


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
