"""Whether a server gets requests: health checks, a circuit breaker, trials of a server that failed, and its load."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.log import get_logger
from penstock.engine.openai.config import HealthConfig, ServerConfig
from penstock.engine.openai.connection import Unreachable
from penstock.engine.openai.server import EngineServer, ServerLoad


@dataclass(slots=True)
class Breaker:
    """A circuit breaker: closed while the server serves, open after failures in a row, closed again by a good trial.

    Requests and health checks are counted separately: a server whose `/health` is fine may still answer garbage.
    """

    config: HealthConfig
    problem: str | None = None
    """Why the server gets no requests; None while it does."""
    _failed_requests: int = field(default=0, init=False)
    _failed_checks: int = field(default=0, init=False)
    _failed_trials: int = field(default=0, init=False)

    @property
    def is_open(self) -> bool:
        return self.problem is not None

    def request_failed(self, reason: str) -> None:
        """Count a request that the server broke; its own refusals are none."""
        self._failed_requests += 1
        if not self.is_open and self._failed_requests >= self.config.failures_max:
            self.problem = f"{reason} ({self._failed_requests} requests in a row failed)"

    def request_succeeded(self) -> None:
        self._failed_requests = 0

    def check_failed(self, reason: str, *, at_once: bool = False) -> None:
        """Count a failed health check, or a failed trial of an open breaker.

        Args:
            reason: what is wrong with the server.
            at_once: no server that will serve soon answers like this; one failure is enough.
        """
        if self.is_open:
            self._failed_trials += 1
            self.problem = reason
            return
        self._failed_checks += 1
        if at_once or self._failed_checks >= self.config.failures_max:
            self.problem = reason

    def check_succeeded(self) -> None:
        """Note a good health check, or the good trial that closes an open breaker."""
        self._failed_checks = 0
        if self.is_open:
            self.problem = None
            self._failed_requests = self._failed_trials = 0

    @property
    def delay_s(self) -> float:
        """Seconds until the next check or trial."""
        config = self.config
        if not self.is_open:
            return config.interval_s
        return min(
            config.interval_s * 2.0 ** min(self._failed_trials, 30),
            max(config.retry_s_max, config.interval_s),
        )


_log = get_logger()


class HealthWatch:
    """Keeps a server's breaker and load up to date. One task runs it."""

    def __init__(
        self,
        server: EngineServer,
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
