"""The engine `region`: a link, which sends requests to another region, and moves them between its frontends when one fails."""

from typing import Any

import msgspec

from penstock.core.errors import Overloaded, PenstockError, Unavailable
from penstock.core.types.load import LinkProblem, LinkReport, WorkerLoad
from penstock.core.types.requests import Request
from penstock.engine.openai.connection import NoAnswer
from penstock.engine.openai.engine import ServerEngine, Serving
from penstock.engine.openai.metrics import ServerLoad
from penstock.engine.openai.region.config import LinkConfig
from penstock.engine.openai.region.server import RegionServer
from penstock.engine.openai.region.stream import MovableStream
from penstock.engine.openai.streams import Stream


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

    def _stream_of(self, request: Request, extra: dict[str, Any]) -> Stream:
        assert not extra, "no KV is transferred between regions"
        return MovableStream(request, self._serving.eos_token_ids)

    async def _watch_server(self) -> None:
        await self._frontends.watch()

    async def _read_answer(self, stream: Stream) -> None:
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

    async def _read_all(self, stream: Stream) -> None:
        await super()._read_answer(stream)
        if not stream.has_finished:
            raise NoAnswer(f"{self._server.name}: the connection was closed within an answer")

    def submit(self, request: Request) -> None:
        try:
            super().submit(request)
        except Overloaded as error:
            raise self._no_room(error) from error

    def _fail(self, stream: Stream, error: PenstockError) -> None:
        if isinstance(error, Overloaded):
            self._end_with(stream, self._no_room(error))
        else:
            super()._fail(stream, error)

    def _no_room(self, error: Overloaded) -> Unavailable:
        """Count a refusal, and make it retryable: unlike a refusal by the last worker here, it must not end the request."""
        self._refused += 1
        return Unavailable(error.message, retry_after_s=error.retry_after_s)
