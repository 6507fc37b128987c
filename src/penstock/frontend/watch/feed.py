"""Snapshots for all watchers: one a second while there are any, and no work while there are none."""

import asyncio

from penstock.core.errors import Overloaded
from penstock.frontend.frontend import Frontend
from penstock.frontend.openai.answers import encode
from penstock.frontend.watch.overview import Supervisor
from penstock.frontend.watch.snapshot import take_snapshot

INTERVAL_S = 1.0
WATCHERS_MAX = 16


class Feed:
    """The latest snapshot, encoded once for all. One event loop owns it."""

    def __init__(self, frontend: Frontend, supervisor: Supervisor | None) -> None:
        self._frontend = frontend
        self._supervisor = supervisor
        self._taking = asyncio.Lock()
        self._taken_s = float("-inf")
        self._latest = b""
        self.watchers = 0

    def arrive(self) -> None:
        """Count a watcher; `leave` is due.

        Raises:
            Overloaded: too many watch already.
        """
        if self.watchers >= WATCHERS_MAX:
            raise Overloaded(
                f"{WATCHERS_MAX} watch this server already, the limit; close a page, or try again later",
                retry_after_s=10.0,
            )
        self.watchers += 1

    def leave(self) -> None:
        """Count a watcher no more."""
        self.watchers -= 1

    async def snapshot(self) -> bytes:
        """Give a snapshot that is at most a second old, as JSON."""
        loop = asyncio.get_running_loop()
        async with self._taking:
            if loop.time() - self._taken_s >= INTERVAL_S:
                self._latest = encode(await take_snapshot(self._frontend, self._supervisor))
                self._taken_s = loop.time()
            return self._latest
