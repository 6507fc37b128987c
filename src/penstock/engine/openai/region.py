"""Another region as a worker: its frontends as one server, and streams that move between its frontends when one fails."""

import asyncio
import itertools
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import Overloaded, PenstockError, Unavailable, WrongServerError
from penstock.core.log import get_logger
from penstock.core.types.load import LINK_VERSION, DeploymentLoads, LinkProblem, LinkReport, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import PackedHashes, PackedTokens, pack_tokens, unpack_tokens
from penstock.engine.openai.apis.api import AnswerPiece
from penstock.engine.openai.config import LinkConfig, RegionConfig
from penstock.engine.openai.connection import (
    NoAnswer,
    NotServing,
    NotThere,
    ServerConnection,
    Unreachable,
    UntrustedError,
    WrongKeyError,
)
from penstock.engine.openai.engine import ServerEngine, ServerStream, Serving
from penstock.engine.openai.make import serving_of
from penstock.engine.openai.server import DEPLOYMENT, EngineServer, ModelAtServer, ServerLoad
from penstock.engine.openai.text import TextCodec
from penstock.engine.spec import EngineSpec

_BYTES = 1 << 16
_PORT = 443


async def send_refusal(url: str, tls: ssl.SSLContext, timeout_s: float) -> None:
    """Begin a TLS handshake, and send the alert with which it fails. Nothing is raised where the server is not reached.

    Args:
        url: of the server.
        tls: does not trust it.
        timeout_s: longest time.
    """
    place = urlsplit(url)
    host = place.hostname or ""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, place.port or _PORT)
            try:
                await _fail(reader, writer, tls, host)
            finally:
                writer.close()


async def _fail(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: ssl.SSLContext, host: str
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = tls.wrap_bio(incoming, outgoing, server_hostname=host)
    has_more = True
    while has_more:
        try:
            handshake.do_handshake()
            has_more = False  # the certificate is trusted by now
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            has_more = False
        writer.write(outgoing.read())
        await writer.drain()
        if has_more:
            content = await reader.read(_BYTES)
            has_more = bool(content)
            incoming.write(content)


_LATEST = 15
"""Answers in the median, those of 2 to 3 s. It ignores single pauses of either side, and follows a new route within 1 to 2 s."""


class RoundTrip:
    """The median time of the latest answers. One event loop owns it."""

    def __init__(self) -> None:
        """Begin without answers."""
        self._latest_s: deque[float] = deque(maxlen=_LATEST)

    @property
    def seconds(self) -> float:
        """The round trip; 0 before the first answer."""
        return median(self._latest_s) if self._latest_s else 0.0

    def note(self, seconds: float) -> None:
        """Note the time from a question, sent on an open connection, to the head of its answer."""
        self._latest_s.append(seconds)


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

    connection: ServerConnection
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
                ServerConnection(
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
        """Ask the best frontend; where it fails or is late, ask all others at once. All frontends together have `timeout_s`."""

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
        """Give a frontend no requests while others are healthy, until a check of the frontend succeeds. A region's only frontend is left to the region's checks."""
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


CLOCK_SKEW_S = 30.0
"""A larger difference of clocks is logged: certificates may then be refused, and logs of both regions do not match."""


class RegionServer(EngineServer):
    """A region's frontends as one server. One event loop owns it."""

    def __init__(self, config: LinkConfig, names: Sequence[str], codec: TextCodec) -> None:
        """Describe it; nothing is asked before `check`.

        Raises:
            ConfigError: the key file or a certificate cannot be read.
        """
        self.frontends = RegionFrontends(config, {"X-Penstock-Region": config.here})
        super().__init__(config.urls[0], config.server(), names, codec, connection=self.frontends)
        self._link = config
        self.clock_skew_s = 0.0
        """Seconds by which the region's clock is ahead of ours, half a round trip more or less."""
        self._says_skew = False
        self.problem = ""
        """A `LinkProblem` of the latest check; empty if it succeeded."""

    async def check(self) -> ModelAtServer:
        try:
            served = await self._check()
        except PenstockError as error:
            self.problem = _problem_of(error)
            if self.problem is LinkProblem.CERTIFICATE:
                await self.frontends.send_refusals()
            raise
        self.problem = ""
        return served

    async def _check(self) -> ModelAtServer:
        served = await super().check()
        if served.owner != DEPLOYMENT:
            raise WrongServerError(
                f"{self.name}: no frontends of Penstock answer there, or those of a release without regions; name its frontends in"
                f" regions.{self._link.name}.urls"
            )
        return served

    def load_path(self) -> str:
        said = {"region": self._link.here, "link": LINK_VERSION, "skew_s": f"{-self.clock_skew_s:.3f}"}
        return f"/load?{urlencode(said)}"

    def take_loads(self, loads: DeploymentLoads) -> None:
        where, wanted = loads.region, self._link.name
        if where == self._link.here:
            raise WrongServerError(
                f"{self.name}: its frontends are of {where!r}, the region of this link; name the frontends of {wanted!r} in"
                f" regions.{wanted}.urls"
            )
        if not loads.link_version or abs(loads.link_version - LINK_VERSION) > 1:
            theirs = f"link version {loads.link_version}" if loads.link_version else "an older release"
            raise WrongServerError(
                f"{self.name}: it has {theirs}, this one link version {LINK_VERSION}; at most one may lie between them: upgrade"
                " the older one"
            )
        if where != wanted:
            said = f"are of region {where!r}" if where else "do not say their region"
            raise WrongServerError(
                f"{self.name}: its frontends {said}, expected {wanted!r}; set router.location.region there, or name it so in"
                " regions here"
            )
        self._note_clock(loads.time_s - wall_time_s())

    def _note_clock(self, skew_s: float) -> None:
        self.clock_skew_s = skew_s
        is_far = abs(skew_s) > CLOCK_SKEW_S
        if is_far and not self._says_skew:
            _log.warning(
                "region_clock_differs",
                region=self._link.name,
                ahead_s=round(skew_s, 1),
                fix="have both regions' hosts keep their time by NTP",
            )
        self._says_skew = is_far


def _problem_of(error: PenstockError) -> LinkProblem:
    if isinstance(error, UntrustedError):
        return LinkProblem.CERTIFICATE
    if isinstance(error, WrongKeyError):
        return LinkProblem.KEY
    return LinkProblem.OTHER_SERVER if isinstance(error, WrongServerError) else LinkProblem.UNREACHABLE


class MovableStream(ServerStream):
    """Keeps the answer so far. One task feeds it."""

    __slots__ = ("_passed", "failed_in_a_row")

    def __init__(self, request: Request, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(request, eos_token_ids, {})
        self._passed: list[int] = []
        self.failed_in_a_row = 0
        """Frontends that have broken the answer since its last token."""

    def feed(self, piece: AnswerPiece) -> Delta | None:
        delta = super().feed(piece)
        if delta is not None and delta.token_ids:
            self._passed += unpack_tokens(delta.token_ids).tolist()
            self.failed_in_a_row = 0
        return delta

    def move(self) -> bool:
        """Have the next frontend go on after the tokens that were passed on; a stop token that was held back is computed again.

        Returns:
            False where only the end of the answer was lost: it ends.
        """
        request = self.request
        self.num_tokens = len(self._passed)
        self._held, self._held_logprobs = (), ()
        emitted = request.num_emitted + self.num_tokens
        if emitted >= request.sampling.max_tokens:  # only the end of the answer was lost
            self._finish, self.is_over = FinishReason.LENGTH, True
            return False
        self.asked = msgspec.structs.replace(
            request,
            token_ids=PackedTokens(request.token_ids + pack_tokens(self._passed)),
            num_emitted=emitted,
            block_hashes=PackedHashes(b""),
        )
        return True


class RegionEngine(ServerEngine):
    """Implements `Engine` over another region. One event loop owns it."""

    def __init__(self, server: RegionServer, config: LinkConfig, serving: Serving) -> None:
        """Make an engine; `start` asks the region."""
        super().__init__(server, config.server(), serving)
        self._region = config.name
        self._frontends = server.frontends
        self._link = server
        self._moved = self._refused = 0
        self._reported: LinkReport | None = None

    def load(self) -> WorkerLoad:
        link = LinkReport(
            region=self._region,
            frontends=len(self._frontends.frontends),
            healthy=self._frontends.num_healthy if self._watch.breaker.problem is None else 0,
            moved=self._moved,
            refused=self._refused,
            clock_skew_s=round(self._link.clock_skew_s, 1),
            round_trip_s=round(self._frontends.round_trip.seconds, 4),
            advertised_chunks=0 if self._prefixes is None else self._prefixes.num_chunks,
            advertised_at_s=0.0 if self._prefixes is None else round(self._prefixes.advertised_at_s),
            problem=self._problem(),
        )
        return msgspec.structs.replace(super().load(), link=link)

    def _problem(self) -> str:
        if self._watch.breaker.problem is not None:
            return self._link.problem or LinkProblem.UNREACHABLE
        has_secret = self._prefixes is None or not self._prefixes.problem
        return "" if has_secret else LinkProblem.SECRET

    def _on_load(self, load: ServerLoad) -> None:
        super()._on_load(load)
        self._report_region()

    def _on_health(self, problem: str | None, is_silent: bool) -> None:  # noqa: FBT001
        super()._on_health(problem, is_silent)
        self._report_region()

    def _report_region(self) -> None:
        link = self.load().link
        if link != self._reported:
            self._reported = link
            self._changed()

    def _stream_of(self, request: Request, extra: dict[str, Any]) -> ServerStream:
        assert not extra, "no KV is transferred between regions"
        return MovableStream(request, self._serving.eos_token_ids)

    async def _watch_server(self) -> None:
        await self._frontends.watch()

    async def _read_answer(self, stream: ServerStream) -> None:
        """Read an answer. When a frontend breaks it, go on at the next, until all frontends in a row have failed without a token."""
        assert isinstance(stream, MovableStream), "made above"
        while True:
            try:
                await self._read_all(stream)
            except NoAnswer:
                stream.failed_in_a_row += 1
                if stream.has_finished or stream.failed_in_a_row > len(self._frontends.frontends):
                    raise
                if stream.move():
                    self._moved += 1
                    continue
            return

    async def _read_all(self, stream: ServerStream) -> None:
        await super()._read_answer(stream)
        if not stream.has_finished:
            raise NoAnswer(f"{self._server.name}: the connection was closed within an answer")

    def submit(self, request: Request) -> None:
        try:
            super().submit(request)
        except Overloaded as error:
            raise self._no_room(error) from error

    def _fail(self, stream: ServerStream, error: PenstockError) -> None:
        if isinstance(error, Overloaded):
            self._end_with(stream, self._no_room(error))
        else:
            super()._fail(stream, error)

    def _no_room(self, error: Overloaded) -> Unavailable:
        """Count a refusal, and make it retryable: unlike a refusal by the last worker here, it must not end the request."""
        self._refused += 1
        return Unavailable(error.message, retry_after_s=error.retry_after_s)


def make_link(spec: EngineSpec) -> RegionEngine:
    """Make the engine of the link that `spec.args` describe.

    Raises:
        ConfigError: an argument is wrong, or a file cannot be read.
    """
    config = LinkConfig.parse(dict(spec.args), source="regions")
    codec = TextCodec.open(spec.model)
    server = RegionServer(config, (*spec.model_names, spec.model), codec)
    return RegionEngine(server, config, serving_of(spec, codec))
