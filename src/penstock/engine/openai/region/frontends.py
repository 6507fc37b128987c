"""The frontends of another region: each request goes to a healthy one with the fewest requests."""

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import Overloaded, PenstockError, Unavailable
from penstock.core.log import get_logger
from penstock.engine.openai.connection import Connection, NoAnswer, NotServing, NotThere, Unreachable
from penstock.engine.openai.region.config import RegionConfig
from penstock.engine.openai.region.refusal import send_refusal
from penstock.engine.openai.region.round_trip import RoundTrip

_ALONE_SHARE = 0.25
"""Share of a question's time in which only the best frontend is asked."""
_log = get_logger()


@dataclass(slots=True, eq=False)
class RegionFrontend:
    """One frontend of the region.

    Attributes:
        problem: why it gets no requests while others are healthy; None where it is healthy.
        streams: the timeouts of requests under way there, by which a silent frontend loses them.
    """

    connection: Connection
    problem: str | None = None
    failed_checks: int = 0
    streams: set[asyncio.Timeout] = field(default_factory=set)


class RegionFrontends:
    """Implements `HttpConnection` over all frontends of a region. One event loop owns it.

    A request that gets no answer at one frontend is sent to the next: no token of it has come. Once all have failed, the error is
    the region's.
    """

    def __init__(self, config: RegionConfig, headers: Mapping[str, str]) -> None:
        """Make one; nothing is connected before the first request. `headers` are of every request.

        Raises:
            ConfigError: a key file or certificate cannot be read.
        """
        self.name = f"region {config.name}"
        self._region = config.name
        self._config = config
        self.round_trip = RoundTrip()
        tls = None if config.tls is None else config.tls.context(f"regions.{config.name}.tls")
        self._tls = tls
        key = config.server().api_key()
        self.frontends = tuple(
            RegionFrontend(
                Connection(
                    url,
                    config.limits,
                    key,
                    name=self.name,
                    headers=headers,
                    tls=tls,
                    keeps=True,
                    on_round_trip=self.round_trip.note,
                )
            )
            for url in config.urls
        )
        self._turns = itertools.count()

    async def close(self) -> None:
        for frontend in self.frontends:
            await frontend.connection.close()

    async def get(self, path: str, *, timeout_s: float, bytes_max: int | None = None) -> bytes:
        """Ask the best frontend and, where it fails or has not answered after a while, all others at once: together they have `timeout_s`."""

        async def ask(frontend: RegionFrontend) -> bytes | PenstockError:
            try:
                return await frontend.connection.get(path, timeout_s=timeout_s, bytes_max=bytes_max)
            except PenstockError as error:
                if _is_failure(error):
                    self._failed(frontend, error.message)
                return error

        ends_s = asyncio.get_running_loop().time() + timeout_s
        best, *others = self._in_turn()
        answer: bytes | PenstockError = Unavailable(
            f"{self.name}: no answer within {timeout_s:g} s by any frontend; are they up, and reachable from here?"
        )
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(best))]
            await asyncio.wait(asked, timeout=timeout_s * _ALONE_SHARE)
            if not asked[0].done() or _is_failure(asked[0].result()):
                asked += [group.create_task(ask(each)) for each in others]
            with suppress(TimeoutError):
                async with asyncio.timeout_at(ends_s):
                    for following in asyncio.as_completed(asked):
                        answer = await following
                        if not _is_failure(answer):
                            break
            for task in asked:
                task.cancel()
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    async def post(
        self, path: str, body: Any, *, timeout_s: float, on_sent: Callable[[], None] | None = None
    ) -> bytes:
        problem: PenstockError | None = None
        for frontend in self._in_turn():
            try:
                return await frontend.connection.post(path, body, timeout_s=timeout_s, on_sent=on_sent)
            except NotThere:
                raise
            except (Unavailable, Overloaded) as error:
                self._failed(frontend, error.message)
                problem = error
        assert problem is not None, "there is a frontend"
        raise problem

    @asynccontextmanager
    async def stream(
        self, path: str, body: Any, on_sent: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        frontend: RegionFrontend | None = None
        try:
            async with AsyncExitStack() as stack:
                frontend, lines = await self._open(stack, path, body, on_sent, headers)
                yield lines
        except NoAnswer as error:
            if frontend is not None:
                self._failed(frontend, error.message)
            raise

    async def watch(self) -> None:
        """Ask each frontend for its health, until cancelled; one alone is watched as the region is."""
        if len(self.frontends) == 1:
            return
        async with asyncio.TaskGroup() as group:
            for frontend in self.frontends:
                group.create_task(self._watch(frontend))

    async def send_refusals(self) -> None:
        """Tell the frontends that their certificates are not trusted here, so that the other side sees why nothing comes."""
        tls, timeout_s = self._tls or ssl.create_default_context(), self._config.health.timeout_s
        async with asyncio.TaskGroup() as group:
            for url in self._config.urls:
                group.create_task(send_refusal(url, tls, timeout_s))

    @property
    def num_healthy(self) -> int:
        return sum(frontend.problem is None for frontend in self.frontends)

    # -- details

    def _in_turn(self) -> Iterator[RegionFrontend]:
        """Yield the frontends, the best one first. One alone is tried twice: a kept connection may have been closed meanwhile."""
        turn = next(self._turns)
        count = len(self.frontends)
        order = sorted(
            range(count),
            key=lambda n: (
                self.frontends[n].problem is not None,
                len(self.frontends[n].streams),
                (n - turn) % count,
            ),
        )
        yield from (self.frontends[n] for n in order)
        if count == 1:
            yield self.frontends[0]

    async def _open(
        self,
        stack: AsyncExitStack,
        path: str,
        body: Any,
        on_sent: Callable[[], None],
        headers: Mapping[str, str] | None,
    ) -> tuple[RegionFrontend, AsyncIterator[bytes]]:
        """Send a request to the first frontend that answers it; `stack` ends it."""
        problem: PenstockError | None = None
        for frontend in self._in_turn():
            try:
                async with AsyncExitStack() as attempt:
                    await attempt.enter_async_context(self._under_way(frontend))
                    lines = await attempt.enter_async_context(
                        frontend.connection.stream(path, body, on_sent, headers)
                    )
                    stack.push_async_exit(attempt.pop_all())
                    return frontend, lines
            except (NoAnswer, NotServing) as error:
                self._failed(frontend, error.message)
                problem = error
        assert problem is not None, "there is a frontend"
        raise problem

    @asynccontextmanager
    async def _under_way(self, frontend: RegionFrontend) -> AsyncIterator[None]:
        """Have a frontend that falls silent lose a request."""
        try:
            async with asyncio.timeout(None) as lost:
                frontend.streams.add(lost)
                try:
                    yield
                finally:
                    frontend.streams.discard(lost)
        except TimeoutError as error:
            raise NoAnswer(f"{self.name}: {frontend.problem}") from error

    async def _watch(self, frontend: RegionFrontend) -> None:
        health = self._config.health
        while True:
            await asyncio.sleep(health.interval_s)
            try:
                await frontend.connection.get("/health", timeout_s=health.timeout_s)
            except Overloaded as error:  # it drains, or has no worker: what is under way there goes on
                self._failed(frontend, error.message)
                continue
            except NotThere:
                pass
            except PenstockError as error:
                frontend.failed_checks += 1
                if isinstance(error, Unreachable) or frontend.failed_checks >= health.failures_max:
                    self._failed(frontend, error.message)
                    for lost in tuple(frontend.streams):
                        lost.reschedule(asyncio.get_running_loop().time())
                continue
            frontend.failed_checks = 0
            if frontend.problem is not None:
                frontend.problem = None
                _log.info("region_frontend_recovered", region=self._region, url=frontend.connection.url)

    def _failed(self, frontend: RegionFrontend, reason: str) -> None:
        """Give a frontend no requests while others are healthy, until a check of it succeeds; one alone is watched as the region is."""
        if len(self.frontends) == 1:
            return
        if frontend.problem is None:
            _log.warning(
                "region_frontend_failed", region=self._region, url=frontend.connection.url, reason=reason
            )
        frontend.problem = reason


def _is_failure(answer: bytes | PenstockError) -> bool:
    """Whether another frontend may answer better."""
    return isinstance(answer, (Unavailable, Overloaded)) and not isinstance(answer, NotThere)
