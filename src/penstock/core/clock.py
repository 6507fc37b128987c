"""Wall-clock dates for people and logs. Durations and deadlines use the event loop's time."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


def wall_time_s() -> float:
    """Seconds since the epoch; for `created` fields and reports only, never for a duration."""
    return time.time()  # noqa: TID251 - the one named place for dates


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Drop it; no error if it was made."""
        ...


class Clock(Protocol):
    """Tells the time, and calls back later."""

    def time(self) -> float:
        """Return seconds, from any origin."""
        ...

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:
        """Call a function after so many seconds."""
        ...


class LoopClock:
    """The clock of the event loop that runs when it is asked."""

    def time(self) -> float:
        """Return the loop's seconds."""
        return asyncio.get_running_loop().time()

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:
        """Call a function after so many seconds."""
        return asyncio.get_running_loop().call_later(delay, callback)
