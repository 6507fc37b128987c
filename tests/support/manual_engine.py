"""An engine whose steps the test yields by hand, for tests of workers."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.ids import RequestId
from penstock.core.types.events import KvEvent
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import num_tokens, pack_tokens


class ManualEngine:
    """Implements `Engine`. `requests` holds submitted requests that are neither finished nor aborted."""

    def __init__(self, info: EngineInfo | None = None) -> None:
        self.info = info or EngineInfo(
            block_size=4, total_blocks=100, context_length=400, max_batch_tokens=64, max_running_requests=8
        )
        self.requests: dict[RequestId, Request] = {}
        self.submitted: list[Request] = []
        self.aborted: list[RequestId] = []
        self.lingering_blocks = 0
        """Blocks that aborted requests still hold, as during a step."""
        self.refusal: Exception | None = None
        """The error that `submit` raises."""
        self.start_error: PenstockError | None = None
        self.closed = False
        self._figures: dict[str, int] = {}
        self._steps: asyncio.Queue[Step | Exception | None] = asyncio.Queue()

    def emit(
        self,
        request_id: str,
        *token_ids: int,
        finish: FinishReason | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Yield a step with one delta."""
        delta = Delta(
            request_id=RequestId(request_id),
            token_ids=pack_tokens(token_ids),
            finish_reason=finish,
            cached_tokens=cached_tokens,
        )
        self.step(deltas=(delta,))

    def step(self, *, deltas: Sequence[Delta] = (), events: Sequence[KvEvent] = ()) -> None:
        """Yield a step; a delta of a request that is not running is an error of the test."""
        for delta in deltas:
            assert delta.request_id in self.requests, f"{delta.request_id} does not run here"
            if delta.finish_reason is not None:
                del self.requests[delta.request_id]
        self._steps.put_nowait(Step(deltas=tuple(deltas), events=tuple(events)))

    def report(self, **figures: int) -> None:
        """Have the worker tell of these figures of its load, from now on, whatever runs."""
        self._figures = figures
        self.step()

    def die(self, error: Exception | None) -> None:
        """Fail the next step with `error`; None ends the steps without one."""
        self._steps.put_nowait(error)

    async def start(self) -> EngineInfo:
        if self.start_error is not None:
            raise self.start_error
        return self.info

    def submit(self, request: Request) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests[request.request_id] = request
        self.submitted.append(request)

    def abort(self, request_id: RequestId) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    async def steps(self) -> AsyncIterator[Step]:
        while (step := await self._steps.get()) is not None:
            if isinstance(step, Exception):
                raise step
            yield step

    def load(self) -> WorkerLoad:
        tokens = sum(num_tokens(request.token_ids) for request in self.requests.values())
        load = WorkerLoad(
            running_requests=len(self.requests),
            active_blocks=-(-tokens // self.info.block_size) + self.lingering_blocks,
            total_blocks=self.info.total_blocks,
        )
        return msgspec.structs.replace(load, **self._figures)

    async def close(self) -> None:
        self.closed = True
        self.requests.clear()
        self._steps.put_nowait(None)
