"""The clock of a replay."""

import heapq
from collections.abc import Callable
from itertools import count


class _Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ReplayClock:
    """Stands still until `advance`, which makes the calls that became due, in order."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, _Timer]] = []
        self._order = count()

    def time(self) -> float:
        """Return the seconds of the replay."""
        return self._now_s

    def call_later(self, delay: float, callback: Callable[[], None], /) -> _Timer:
        """Call a function once the clock is so many seconds further."""
        timer = _Timer(callback)
        heapq.heappush(self._due, (self._now_s + delay, next(self._order), timer))
        return timer

    def advance(self, now_s: float) -> None:
        """Set the time, which never goes back."""
        while self._due and self._due[0][0] <= now_s:
            self._now_s, _, timer = heapq.heappop(self._due)
            if timer.callback is not None:
                timer.callback()
        self._now_s = now_s
