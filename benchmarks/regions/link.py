"""A link to another region without HTTP: what `engine.openai` asks of a server, asked of a dispatcher some milliseconds away."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from penstock.core import wire
from penstock.core.errors import PenstockError, StepFailed, Unavailable
from penstock.core.types.requests import Request
from penstock.core.wire import token_list
from penstock.engine.openai.apis.api import Piece
from penstock.engine.openai.apis.completions import Completions
from penstock.engine.openai.connection import NotThere
from penstock.engine.openai.engine import ServerEngine
from penstock.engine.openai.metrics import ServerLoad, deployment_load
from penstock.engine.openai.server import ServedModel
from penstock.frontend.limits.prefix_query import PrefixQuery
from penstock.router.dispatch.dispatcher import Dispatcher


class Place(Protocol):
    """Another region: its router, and whether it answers at all."""

    name: str
    is_lost: bool

    @property
    def dispatcher(self) -> Dispatcher: ...


@dataclass(slots=True)
class Crossings:
    """What crossed by a link."""

    requests: int = 0
    summaries: int = 0
    summary_bytes: int = 0
    summary_cpu_s: float = 0.0
    """Of the process, to make the summaries; real time."""
    unanswered_s: list[float] = field(default_factory=list)
    """When requests were sent that a lost region did not answer."""
    peak_bytes_per_s: float = 0.0
    """Of one answer over the time since the one before."""

    def note(self, num_bytes: int, interval_s: float) -> None:
        """Count an answer."""
        self.summaries += 1
        self.summary_bytes += num_bytes
        self.peak_bytes_per_s = max(self.peak_bytes_per_s, num_bytes / max(interval_s, 1e-9))


class DistantServer:
    """Answers as `engine.openai.server.Server` does. A region that is lost hangs: nothing says that it is gone.

    The way of a request and its answer is that between router and link. Opening a connection, and asking for load and
    prefixes, takes a round trip more.
    """

    def __init__(self, there: Place, model: str, *, round_trip_s: float, timeout_s: float) -> None:
        self.url = self.name = f"sim://{there.name}"
        self.connection = self
        self.api = Completions(model, "penstock")
        self.crossings = Crossings()
        self._there = there
        self._model = model
        self._round_trip_s, self._timeout_s = round_trip_s, timeout_s

    async def check(self) -> ServedModel:
        load = await self._deployment_load()
        if load.workers < 1:
            raise Unavailable(f"{self.url}: no worker of its own serves now")
        return ServedModel(self._model, None, "penstock")

    async def try_out(self, served: ServedModel) -> None:
        del served
        await self._way()

    async def load(self) -> ServerLoad:
        return await self._deployment_load()

    async def get(self, path: str, *, timeout_s: float, bytes_max: int | None = None) -> bytes:
        """Answer `/prefixes` as a frontend does."""
        del timeout_s
        await self._way()
        asked = PrefixQuery.read(dict(parse_qsl(path.partition("?")[2])))
        begun_s = time.process_time()
        summary = self._there.dispatcher.prefix_summary(asked.model, "", asked.after, asked.interval_s)
        self.crossings.summary_cpu_s += time.process_time() - begun_s
        if summary is None:
            raise NotThere(f"{self.url}{path}: 404")
        content = wire.encode(summary)
        assert bytes_max is None or len(content) <= bytes_max, f"{len(content)} bytes of {bytes_max}"
        self.crossings.note(len(content), asked.interval_s)
        return content

    @asynccontextmanager
    async def answer(
        self, request: Request, extra: dict[str, Any], on_sent: Callable[[], None]
    ) -> AsyncIterator[AsyncIterator[Piece]]:
        del extra
        yield self._pieces(request, on_sent)

    async def close(self) -> None: ...

    async def _deployment_load(self) -> ServerLoad:
        await self._way()
        load = self._there.dispatcher.load(self._model)
        if load is None:
            raise Unavailable(f"{self.url}: no worker of its own serves now")
        return deployment_load(load)

    async def _way(self) -> None:
        await asyncio.sleep(self._round_trip_s)
        if self._there.is_lost:
            await asyncio.sleep(self._timeout_s)
            raise Unavailable(f"{self.url}: no answer within {self._timeout_s:g} s")

    async def _pieces(self, request: Request, on_sent: Callable[[], None]) -> AsyncIterator[Piece]:
        await asyncio.sleep(self._round_trip_s)
        on_sent()
        try:
            await self._until_found()
            self.crossings.requests += 1
            forwarded = msgspec.structs.replace(request, is_forwarded=True)
            async with self._there.dispatcher.open(forwarded) as stream:
                async for delta in stream:
                    yield Piece(
                        token_ids=tuple(token_list(delta.token_ids)),
                        finish_reason=delta.finish_reason,
                        cached_tokens=delta.cached_tokens,
                        is_last=delta.finish_reason is not None,
                    )
        except PenstockError as error:
            await self._until_found()
            raise StepFailed(error.message) from error

    async def _until_found(self) -> None:
        """Wait for ever where the region is lost: a request there ends by its link's doubts."""
        if self._there.is_lost:
            self.crossings.unanswered_s.append(asyncio.get_running_loop().time())
            await asyncio.Event().wait()


class RegionLink(ServerEngine):
    """The real engine of a link, as a simulated cluster takes it."""

    pool = kv = None

    def check(self) -> None:
        """Nothing of its own can be inconsistent."""

    def so_far(self) -> None:
        """It delivers at once."""
