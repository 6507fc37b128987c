"""An engine as those of other projects look from outside: several tokens in a step, KV events that come late."""

import asyncio
from collections.abc import AsyncIterator, Callable

from msgspec.structs import replace

from penstock.core.errors import RequestError, Unavailable
from penstock.core.ids import RequestId
from penstock.core.types.events import AllBlocksCleared, KvEvent
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import PackedTokens
from penstock.seams import Engine


class ForeignEngine:
    """Implements `Engine` over another engine, and no other protocol. It refuses `min_tokens`, as a server would: late."""

    def __init__(self, make: Callable[[], Engine], *, events_late_s: float = 0.01) -> None:
        self._make = make
        self._inner = make()
        self._events_late_s = events_late_s
        self._info: EngineInfo | None = None
        self._deltas: dict[RequestId, Delta] = {}
        self._events: list[KvEvent] = []
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> EngineInfo:
        if self._info is None:
            self._info = await self._inner.start()
            self._pump = asyncio.get_running_loop().create_task(self._run(self._inner))
        return self._info

    def submit(self, request: Request) -> None:
        if self._closed:
            raise Unavailable("the engine is closed; try another worker")
        if request.sampling.min_tokens:
            error = RequestError("min_tokens: this engine has none; leave it out").to_info()
            self._bring(Delta(request.request_id, finish_reason=FinishReason.ERROR, error=error))
            return
        self._inner.submit(request)

    def abort(self, request_id: RequestId) -> None:
        self._inner.abort(request_id)
        self._deltas.pop(request_id, None)

    async def steps(self) -> AsyncIterator[Step]:
        while not self._closed:
            await self._wake.wait()
            await asyncio.sleep(0.001)  # more comes meanwhile
            self._wake.clear()
            deltas, self._deltas = self._deltas, {}
            events, self._events = self._events, []
            if deltas or events:
                yield Step(deltas=tuple(deltas.values()), events=tuple(events), load=self.load())

    def load(self) -> WorkerLoad:
        return self._inner.load()

    async def close(self) -> None:
        self._closed = True
        self._wake.set()
        await self._inner.close()
        if self._pump is not None:
            await self._pump

    async def clear(self) -> None:
        """Drop the prefix cache, by a new engine in place of the old one."""
        await self._inner.close()
        if self._pump is not None:
            await self._pump
        self._inner = self._make()
        await self._inner.start()
        self._pump = asyncio.get_running_loop().create_task(self._run(self._inner))
        self._events.append(AllBlocksCleared())
        self._wake.set()

    async def _run(self, inner: Engine) -> None:
        async for step in inner.steps():
            for delta in step.deltas:
                self._bring(delta)
            if step.events:
                asyncio.get_running_loop().call_later(self._events_late_s, self._tell, step.events)

    def _bring(self, delta: Delta) -> None:
        had = self._deltas.get(delta.request_id)
        if had is not None:
            delta = replace(
                delta,
                token_ids=PackedTokens(had.token_ids + delta.token_ids),
                cached_tokens=had.cached_tokens if delta.cached_tokens is None else delta.cached_tokens,
                logprobs=had.logprobs + delta.logprobs,
            )
        self._deltas[delta.request_id] = delta
        self._wake.set()

    def _tell(self, events: tuple[KvEvent, ...]) -> None:
        self._events += events
        self._wake.set()
