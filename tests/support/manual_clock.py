"""A clock that tests turn by hand."""

from collections.abc import Callable
from itertools import count


class _Call:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A `kv.manager.clock.Clock`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = count()
        self._calls: list[tuple[float, int, _Call]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, callback: Callable[[], None], /) -> _Call:
        call = _Call(callback)
        self._calls.append((self.now_s + delay, next(self._order), call))
        return call

    def advance(self, seconds: float) -> None:
        """Let time pass, and make the calls that are due, in order."""
        end_s = self.now_s + seconds
        while due := [each for each in self._calls if each[0] <= end_s]:
            first = min(due, key=lambda each: each[:2])
            self._calls.remove(first)
            self.now_s, _, call = first
            if call.callback is not None:
                call.callback()
        self.now_s = end_s
