"""Watches a server: health checks, trials after failures, and its metrics."""

import asyncio
from collections.abc import Callable

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.log import get_logger
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.connection import Unreachable
from penstock.engine.openai.health.breaker import Breaker
from penstock.engine.openai.metrics import ServerLoad
from penstock.engine.openai.server import Server

_log = get_logger()


class HealthWatch:
    """Keeps a server's breaker and load up to date. One task runs it."""

    def __init__(
        self,
        server: Server,
        config: ServerConfig,
        *,
        on_change: Callable[[str | None, bool], None],
        on_load: Callable[[ServerLoad], None],
    ) -> None:
        """Watch nothing yet.

        Args:
            server: it was tried already.
            config: intervals.
            on_change: called with (why the server gets no requests or None, whether it is silent) at every change.
            on_load: called with each new load.
        """
        self.breaker = Breaker(config.health)
        self._server = server
        self._config = config
        self._on_change = on_change
        self._on_load = on_load
        self._told: str | None = None
        self._doubt = asyncio.Event()

    def request_failed(self, reason: str) -> None:
        """Note a request that the server broke, and check the server soon."""
        self.breaker.request_failed(reason)
        self._tell(is_silent=False)
        self._doubt.set()

    def request_succeeded(self) -> None:
        self.breaker.request_succeeded()

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_health())
            group.create_task(self._watch_load())

    async def _watch_health(self) -> None:
        while True:
            await self._pause()
            try:
                described = await self._server.check()
                if self.breaker.is_open:
                    await self._server.try_out(described)
            except PenstockError as error:
                at_once = isinstance(error, (ConfigError, Unreachable))
                self.breaker.check_failed(error.message, at_once=at_once)
            else:
                self.breaker.check_succeeded()
            self._tell(is_silent=True)

    async def _pause(self) -> None:
        """Wait until the next check is due; a doubt makes it due at once, once between two checks."""
        try:
            async with asyncio.timeout(self.breaker.delay_s):
                if self.breaker.is_open:
                    await asyncio.Event().wait()
                await self._doubt.wait()
        except TimeoutError:
            pass
        self._doubt.clear()

    async def _watch_load(self) -> None:
        """Read the metrics; after failures in a row, or where there are none, only our own requests count."""
        pause_s, failures = self._config.load_interval_s, 0
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._config.load_interval_s
            if self.breaker.is_open:
                continue
            try:
                load = await self._server.load()
            except PenstockError:  # the health check tells what is wrong
                load, failures = None, failures + 1
                if failures < self._config.health.failures_max:
                    continue
            else:
                failures = 0
                if load is None:
                    pause_s = self._config.health.retry_s_max
            self._on_load(load or ServerLoad())

    def _tell(self, *, is_silent: bool) -> None:
        problem = self.breaker.problem
        if problem == self._told:
            return
        was, self._told = self._told, problem
        if problem is None:
            _log.info("server_recovered", server=self._server.name)
        elif was is None:
            _log.warning("server_failed", server=self._server.name, reason=problem)
        self._on_change(problem, is_silent)
