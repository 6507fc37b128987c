"""What the loader and the offloader count of each tier, and the clock that they use."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(slots=True)
class TierTally:
    """Counts of one tier since start, as `KvTierCounts` has them."""

    hit_tokens: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0
    offloaded_blocks: int = 0
    shed_blocks: int = 0
    late_loads: int = 0
    lacking_blocks: int = 0
