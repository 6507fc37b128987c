"""An engine of your own, which answers with the prompt, over and over.

PYTHONPATH=examples penstock serve --demo --engine echo_engine:EchoEngine

`examples/echo_engine_suite.py` runs the engine suite on it.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from penstock.core.errors import Overloaded, RequestError, Unavailable
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import pack_tokens
from penstock.engine.scheduling.sequences import Sequence, SequenceLimits
from penstock.engine.spec import EngineSpec


class EchoEngine:
    def __init__(self, spec: EngineSpec) -> None:  # what the graph says of the engine
        size, blocks, batch = spec.block_size, spec.kv_blocks or 4096, spec.scheduler
        self.limits = SequenceLimits(size, spec.context_length, size * blocks, spec.vocab_size, spec.hash_key)
        most = (self.limits.context_length, batch.max_batch_tokens, batch.max_waiting_requests)
        self.info = EngineInfo(size, blocks, *most, kv_events=False)  # it has no prefix cache
        self.eos_token_ids = spec.eos_token_ids
        self.open = {}  # by request id: [checked request, output tokens so far, None before the first]
        self.counts, self.wake, self.closed = Counter(), asyncio.Event(), False

    async def start(self) -> EngineInfo:  # a real engine loads its model here
        return self.info

    def submit(self, request: Request) -> None:
        if self.closed:
            raise Unavailable("the engine is closed; try another worker")
        if request.request_id in self.open:
            raise RequestError(f"request_id: {request.request_id!r} is under way; choose another")
        if len(self.open) >= self.info.max_running_requests:
            raise Overloaded(f"{len(self.open)} requests run, which is the most", retry_after_s=1.0)
        if request.sampling.logprobs is not None:
            raise RequestError("logprobs: an echo has none; leave it out", param="logprobs")
        self.open[request.request_id] = [Sequence.of(request, self.limits, arrival=0), None]
        self.wake.set()

    def abort(self, request_id: str) -> None:
        self.open.pop(request_id, None)

    async def steps(self) -> AsyncIterator[Step]:
        while await self.wake.wait() and not self.closed:
            self.counts.update(steps=1)
            yield Step(deltas=tuple(self.next_token(*one) for one in [*self.open.values()]), load=self.load())
            await asyncio.sleep(0.002)  # a real engine computes the next step here, in a thread
            if not self.open:
                self.wake.clear()

    def next_token(self, it: Sequence, done: int | None) -> Delta:
        request, sampling, is_first = it.request, it.request.sampling, done is None
        position = request.num_emitted if is_first else done  # what another worker emitted is output, too
        token = int(it.token_ids[(position + request.choice) % it.num_prompt])
        self.open[request.request_id][1] = position + 1
        self.counts.update(generated_tokens=1, prefilled_tokens=it.known * is_first)
        stops = sampling.stop_token_ids + (() if sampling.ignore_eos else self.eos_token_ids)
        reason = FinishReason.LENGTH if it.num_prompt + position + 1 >= it.end_tokens else None
        reason = FinishReason.STOP if token in stops and position >= sampling.min_tokens else reason
        if reason:
            self.abort(request.request_id)
        return Delta(request.request_id, pack_tokens([token]), reason, 0 if is_first else None)

    def load(self) -> WorkerLoad:
        prompt = sum(it.known for it, done in self.open.values() if done is None)
        context = sum(it.num_prompt + (done or 0) for it, done in self.open.values())
        sizes = {"total_blocks": self.info.total_blocks, "running_requests": len(self.open)}
        return WorkerLoad(queued_prefill_tokens=prompt, context_tokens=context, **sizes, **self.counts)

    async def close(self) -> None:
        self.closed = True
        self.wake.set()
