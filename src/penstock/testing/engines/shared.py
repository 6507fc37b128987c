"""One started engine for all tests of a class, for engines that take long to start."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from penstock.seams import Engine
from penstock.testing.engines.probe import EngineProbe, EngineSetup

T = TypeVar("T")


class SharedEngine:
    """Keeps the engine of the latest setup, and the event loop that it lives on."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._started: tuple[EngineSetup, EngineProbe[Engine]] | None = None
        self._is_leased = False

    def run(self, main: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a test's coroutine.

        Raises:
            TimeoutError: it took longer.
        """

        async def limited() -> T:
            async with asyncio.timeout(timeout_s):
                return await main

        return self._runner.run(limited())

    @asynccontextmanager
    async def lease(
        self, setup: EngineSetup, make: Callable[[], EngineProbe[Engine]]
    ) -> AsyncIterator[EngineProbe[Engine]]:
        """Lend the engine of this setup, and stop one of another setup; after a failed test it is stopped."""
        assert not self._is_leased, "a test with two engines at once needs starts_slowly = False"
        if self._started is not None and self._started[0] != setup:
            await self.stop()
        if self._started is None:
            self._started = setup, await make().__aenter__()
        probe = self._started[1]
        self._is_leased = True
        try:
            yield probe
            await probe.renew()
        except BaseException:
            await self.stop()
            raise
        finally:
            self._is_leased = False

    async def stop(self) -> None:
        """Close the engine."""
        started, self._started = self._started, None
        if started is not None:
            await started[1].__aexit__(None, None, None)

    def close(self) -> None:
        """Close the engine and the loop."""
        self._runner.run(self.stop())
        self._runner.close()
