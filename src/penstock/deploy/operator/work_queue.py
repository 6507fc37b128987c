"""Keys to work on: each at most once, failed ones again after a pause that doubles."""

import asyncio
import random
from collections import OrderedDict

_PAUSE_S, _PAUSE_S_MAX = 0.5, 300.0


class WorkQueue:
    """A queue of names, at most one entry each. One event loop owns it."""

    def __init__(
        self, rng: random.Random, *, pause_s: float = _PAUSE_S, pause_s_max: float = _PAUSE_S_MAX
    ) -> None:
        """Be empty; `rng` gives jitter to pauses between `pause_s` and `pause_s_max`."""
        self._rng = rng
        self._pause_s, self._pause_s_max = pause_s, pause_s_max
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Count the names that may be worked on now."""
        return len(self._ready)

    def add(self, name: str) -> None:
        """Have a name worked on soon: once, however often it is added before that."""
        timer = self._waiting.pop(name, None)
        if timer is not None:
            timer.cancel()
        self._ready[name] = None
        self._changed.set()

    async def take(self) -> str:
        """Wait for a name and take it."""
        while not self._ready:
            self._changed.clear()
            await self._changed.wait()
        name, _ = self._ready.popitem(last=False)
        return name

    def done(self, name: str, *, again_s: float | None = None) -> None:
        """Note that work on a name succeeded; have it worked on again after `again_s`."""
        self._failures.pop(name, None)
        if again_s is not None:
            self._later(name, again_s)

    def failures(self, name: str) -> int:
        """Count how often in a row work on a name has failed."""
        return self._failures.get(name, 0)

    def failed(self, name: str, *, least_s: float = 0.0) -> float:
        """Have a name worked on again after a pause of `least_s` or more, in which `add` may come first; returns the pause in seconds."""
        count = self._failures[name] = self._failures.get(name, 0) + 1
        longest_s: float = min(self._pause_s * 2 ** min(count - 1, 16), self._pause_s_max)
        pause_s = max(longest_s * self._rng.uniform(0.5, 1.0), least_s)
        self._later(name, pause_s)
        return pause_s

    def close(self) -> None:
        """Forget all."""
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()
        self._ready.clear()

    def _later(self, name: str, seconds: float) -> None:
        if name in self._ready:
            return
        timer = self._waiting.pop(name, None)
        if timer is not None:
            timer.cancel()
        self._waiting[name] = asyncio.get_running_loop().call_later(seconds, self.add, name)
