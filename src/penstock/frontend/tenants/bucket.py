"""A token bucket: a rate with a burst."""

import math


class Bucket:
    """Its level rises at the rate up to the burst. What is taken lowers it, below 0 too: that is a debt, paid before the next.

    Not thread-safe; times are event loop time.
    """

    __slots__ = ("_at_s", "_burst", "_level", "_per_s")

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        """Start it full."""
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at_s = now_s

    def reset(self, per_s: float, burst: float, now_s: float) -> None:
        """Change the rate; a debt stays, and more than the new burst is lost."""
        self._level = min(self.level(now_s), burst)
        self._per_s, self._burst = per_s, burst

    def level(self, now_s: float) -> float:
        """Give what may be taken now."""
        if now_s > self._at_s:
            self._level = min(self._level + (now_s - self._at_s) * self._per_s, self._burst)
            self._at_s = now_s
        return self._level

    def wait_s(self, least: float, now_s: float) -> float:
        """Give the seconds until the level is `least`, which is at most the burst; 0 if it is."""
        missing = min(least, self._burst) - self.level(now_s)
        return max(missing / self._per_s, 0.0)

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount; a negative one is given back."""
        self._level = min(self.level(now_s) - amount, self._burst)

    def check(self) -> None:
        """Raise AssertionError where the level is past the burst."""
        assert math.isfinite(self._level), self._level
        assert self._level <= self._burst, f"{self._level} of {self._burst}"
