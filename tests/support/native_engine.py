"""A mock engine that transfers KV by itself: `NativeKvTransfer` without `KvBlocks`."""

from collections.abc import AsyncIterator

import msgspec

from penstock.core.ids import RequestId
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, KvHandle, Request
from penstock.core.wire import NO_TOKENS
from tests.support.kv_transfer import tiny_engine


class NativeEngine:
    """Hands KV over by a shared table of payloads. `early` hands over before the prompt is computed, as SGLang does."""

    def __init__(self, table: dict[bytes, int], *, early: bool = False, kind: str = "native-1") -> None:
        """Make an engine.

        Args:
            table: payload to the number of times that KV was taken by it; shared by all engines of a test.
            early: whether a prefill answers with its handle at once.
            kind: what `kv_transfer_kind` gives.
        """
        self.inner = tiny_engine()
        self.loads: list[bytes] = []
        """Payloads of the requests that came with KV."""
        self.aborted: list[RequestId] = []
        self._table = table
        self._early = early
        self._kind = kind
        self._prefills: set[RequestId] = set()
        self._prefilled: list[Delta] = []

    def kv_transfer_kind(self) -> str:
        return self._kind

    async def start(self) -> EngineInfo:
        return await self.inner.start()

    def submit(self, request: Request) -> None:
        if request.kv is not None:
            assert request.num_emitted == 0, "the decode worker samples the first token"
            assert request.kv.payload in self._table, "a handle of this kind of engine"
            self._table[request.kv.payload] += 1
            self.loads.append(request.kv.payload)
        elif request.prefill_only:
            self._prefills.add(request.request_id)
            if self._early:
                self._prefilled.append(self._end_prefill(request.request_id))
                self.inner._wake.set()
        self.inner.submit(msgspec.structs.replace(request, kv=None))

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        self.inner.abort(request_id)

    async def steps(self) -> AsyncIterator[Step]:
        async for step in self.inner.steps():
            deltas = [*self._prefilled, *map(self._without_token, step.deltas)]
            self._prefilled.clear()
            yield msgspec.structs.replace(step, deltas=tuple(deltas), prefilling=())

    def load(self) -> WorkerLoad:
        return self.inner.load()

    async def close(self) -> None:
        await self.inner.close()

    def _without_token(self, delta: Delta) -> Delta:
        if delta.finish_reason is not FinishReason.LENGTH or delta.request_id not in self._prefills:
            return delta
        self._prefills.discard(delta.request_id)
        return self._end_prefill(delta.request_id, delta)

    def _end_prefill(self, request_id: RequestId, delta: Delta | None = None) -> Delta:
        payload = request_id.encode()
        self._table.setdefault(payload, 0)
        delta = delta or Delta(request_id=request_id, finish_reason=FinishReason.LENGTH)
        return msgspec.structs.replace(delta, token_ids=NO_TOKENS, kv=KvHandle.native(payload, 50, 60.0))
