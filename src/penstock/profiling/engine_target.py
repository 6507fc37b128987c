"""Measures an engine in this process step by step; times include the scheduler.

Times are event loop time, so that an engine on virtual time is measured in virtual seconds.
"""

import asyncio
import statistics
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import EngineError
from penstock.core.ids import RequestId
from penstock.core.types.load import Step
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.perf.profile import DecodePoint, PrefillPoint
from penstock.profiling.target import (
    DECODE_STEPS,
    SETTLING_STEPS,
    DecodeCell,
    Description,
    Limits,
    PrefillCell,
)
from penstock.seams import Engine


class EngineTarget:
    """Drives an engine, which runs while the context is open.

    Decode cells and cached prefixes use a library of prompts, one per sequence of a batch so that sequences share no
    memory. They are computed once and then found in the prefix cache.
    """

    def __init__(self, engine: Engine, description: Description, *, vocab_size: int, seed: int) -> None:
        self._engine = engine
        self._said = description
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)
        self._library: list[NDArray[np.int32]] = []
        self._numbers = count()
        self._steps: AsyncIterator[Step] | None = None
        self.limits = Limits()

    async def __aenter__(self) -> Self:
        try:
            info = await self._engine.start()
        except BaseException:
            await self._engine.close()
            raise
        self.limits = Limits(
            context_length=info.context_length,
            step_tokens=info.max_batch_tokens,
            max_batch=min(info.max_running_requests, info.max_batch_tokens),
            kv_tokens=info.total_blocks * info.block_size,
            block_size=info.block_size,
        )
        self._bytes_per_token = info.kv_bytes_per_block / info.block_size
        self._steps = self._engine.steps()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await cast("AsyncGenerator[Step]", self._steps).aclose()
        finally:
            await self._engine.close()

    @property
    def description(self) -> Description:
        said = self._said
        return Description(
            engine=said.engine,
            model=said.model,
            engine_version=said.engine_version,
            hardware=said.hardware,
            machine=said.machine,
            kv_bytes_per_token=self._bytes_per_token,
            kv_capacity_tokens=self.limits.kv_tokens or 0,
        )

    async def prefill(self, cell: PrefillCell) -> PrefillPoint:
        prefixes = await self._prefixes(cell.prompts, cell.cached_tokens)
        fresh = self._fresh(cell.prompts, cell.new_tokens)
        now_s = asyncio.get_running_loop().time
        begin_s = now_s()
        with self._requests(np.hstack((prefixes, fresh)), max_tokens=1) as waiting:
            cached = 0
            while waiting:
                step = await self._step()
                cached += sum(delta.cached_tokens or 0 for delta in step.deltas)
                waiting -= {delta.request_id for delta in step.deltas}
        seconds = now_s() - begin_s
        total = cell.new_tokens + cell.cached_tokens
        hit = cached // cell.prompts
        return PrefillPoint(new_tokens=total - hit, cached_tokens=hit, prompts=cell.prompts, seconds=seconds)

    async def decode(self, cell: DecodeCell) -> DecodePoint:
        length = cell.prompt_tokens
        block = self.limits.block_size
        prefixes = await self._prefixes(cell.batch, (length - 1) // block * block)
        fresh = self._fresh(cell.batch, length - prefixes.shape[1])
        now_s = asyncio.get_running_loop().time
        steps_s: list[float] = []
        contexts: list[int] = []
        decoding = 0
        with self._requests(np.hstack((prefixes, fresh)), max_tokens=cell.generated_tokens) as running:
            while len(steps_s) < DECODE_STEPS:
                begin_s = now_s()
                step = await self._step()
                is_whole = len(step.deltas) == cell.batch and all(
                    d.cached_tokens is None for d in step.deltas
                )
                decoding += is_whole
                if is_whole and decoding > SETTLING_STEPS:
                    steps_s.append(now_s() - begin_s)
                    contexts.append(self._engine.load().context_tokens)
                running -= {delta.request_id for delta in step.deltas if delta.finish_reason is not None}
                if len(running) < cell.batch:
                    break
        if not steps_s:
            raise EngineError(f"its {cell.batch} sequences never decoded together; take smaller --batches")
        return DecodePoint(
            batch=cell.batch,
            context=round(statistics.mean(contexts) / cell.batch),
            seconds=statistics.median(steps_s),
        )

    async def _prefixes(self, rows: int, length: int) -> NDArray[np.int32]:
        """Give (rows, length) int32 tokens in the prefix cache, if it has room for them."""
        if not length:
            return np.zeros((rows, 0), dtype=np.int32)
        self._extend(rows, length)
        prompts = np.array([row[:length] for row in self._library[:rows]])
        with self._requests(np.hstack((prompts, self._fresh(rows, 1))), max_tokens=1) as waiting:
            while waiting:
                waiting -= {delta.request_id for delta in (await self._step()).deltas}
        return prompts

    def _extend(self, rows: int, length: int) -> None:
        for row in range(rows):
            if row == len(self._library):
                self._library.append(np.zeros(0, dtype=np.int32))
            known = self._library[row]
            if len(known) < length:
                self._library[row] = np.concatenate((known, self._fresh(1, length - len(known))[0]))

    def _fresh(self, rows: int, length: int) -> NDArray[np.int32]:
        return self._random.integers(1, self._vocab_size, (rows, length), dtype=np.int32)

    @contextmanager
    def _requests(self, prompts: NDArray[np.int32], *, max_tokens: int) -> Iterator[set[RequestId]]:
        """Submit all requests, and abort unfinished ones at the end; this task runs all steps, so the abort is immediate."""
        request_ids = set()
        try:
            for prompt in prompts:
                request = Request(
                    request_id=RequestId(f"profile-{next(self._numbers)}"),
                    model=self._said.model,
                    token_ids=pack_tokens(prompt),
                    sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                )
                self._engine.submit(request)
                request_ids.add(request.request_id)
            yield set(request_ids)
        finally:
            for request_id in request_ids:
                self._engine.abort(request_id)

    async def _step(self) -> Step:
        assert self._steps is not None, "entered"
        step = await anext(self._steps)
        for delta in step.deltas:
            if delta.error is not None:
                raise EngineError(delta.error.message)
        return step
