"""When requests of batches may start: a few at once while the process has other requests, more while it has none."""

import asyncio
from collections.abc import Callable

from penstock.frontend.config import BatchesConfig

_LOOK_S = 0.05


class Gaps:
    """Counts the requests of all batches of a process. One event loop owns it."""

    def __init__(
        self, config: BatchesConfig, inflight: Callable[[], int], is_served: Callable[[], bool]
    ) -> None:
        """Set limits.

        Args:
            config: gives how many run at once.
            inflight: counts the requests in flight of this process, those of batches included.
            is_served: whether any model can be asked now.
        """
        self._config = config
        self._inflight = inflight
        self._is_served = is_served
        self.running = 0
        self.admitted = 0
        """Of `running`, those that `inflight` counts."""

    async def wait(self) -> None:
        """Wait until one more request may start, and count it until `leave`."""
        while not self._is_served() or self.running >= self._limit():  # noqa: ASYNC110 - admission has no event
            await asyncio.sleep(_LOOK_S)
        self.running += 1

    def leave(self) -> None:
        self.running -= 1

    def _limit(self) -> int:
        others = self._inflight() - self.admitted
        return self._config.at_once_busy if others > 0 else self._config.at_once
