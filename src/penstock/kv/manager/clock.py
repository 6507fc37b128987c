"""The clock of loads: the event loop's, or a simulator's."""

import asyncio
from collections.abc import Callable
from typing import Protocol


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
