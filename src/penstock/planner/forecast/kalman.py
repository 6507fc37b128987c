"""Forecast: a Kalman filter of level and slope."""

import math


class Kalman:
    """Follows level and slope, each of which wanders, through noise that it estimates from its own errors.

    The state is (level, slope); `wander` is the standard deviation by which the slope changes in an interval, as a share of
    the noise's. Source: the local linear trend model, Harvey (1989), with the noise estimated as in Mehra (1970).
    """

    def __init__(self, wander: float = 0.05) -> None:
        """Begin without values; `wander` is above 0."""
        if wander <= 0:
            raise ValueError(f"wander is {wander}, expected above 0")
        self.name = f"kalman {wander:g}"
        self._wander = wander
        self._level: float | None = None
        self._slope = 0.0
        # Covariance of the state over the noise's variance.
        self._level_var, self._cross, self._slope_var = 1.0, 0.0, 0.1
        self._noise = 0.0

    def observe(self, value: float) -> None:
        if self._level is None:
            self._level = value
            return
        level = self._level + self._slope
        drift = self._wander**2
        level_var = self._level_var + 2 * self._cross + self._slope_var + drift / 3
        cross = self._cross + self._slope_var + drift / 2
        slope_var = self._slope_var + drift
        error = value - level
        spread = math.sqrt(self._noise * (level_var + 1))
        if spread and abs(error) > 5 * spread:
            # A jump: forget the slope, follow at once, and learn the new level's noise.
            level_var, cross, slope_var = level_var + 10.0, 0.0, slope_var + 0.1
            self._slope = 0.0
        gain, slope_gain = level_var / (level_var + 1), cross / (level_var + 1)
        self._level = max(0.0, level + gain * error)
        self._slope += slope_gain * error
        self._level_var = (1 - gain) * level_var
        self._cross = (1 - gain) * cross
        self._slope_var = slope_var - slope_gain * cross
        self._noise += 0.05 * (error * error / (level_var + 1) - self._noise)

    def predict(self, steps: int) -> float | None:
        if self._level is None:
            return None
        # Far ahead a slope says little: half of it is left after twenty steps.
        reach = sum(0.966**step for step in range(min(steps, 200)))
        return max(0.0, self._level + reach * self._slope)
