"""For tests of KV transfers: small engines that check their KV on every step, and transports with delays."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from penstock.core.descriptors import RangePairs, Region, RegionInfo, TransferCost, TransferOp
from penstock.core.ids import RequestId
from penstock.core.types.instances import Prices
from penstock.core.types.kv import KvLayout
from penstock.core.types.requests import Delta, FinishReason, Request, SamplingParams
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.engine.batched import BatchedEngine
from penstock.engine.kv_tiers import TierMaker
from penstock.engine.mock import MockConfig, StepTiming, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.seams import Link, Move, TransferChannel
from penstock.transfer.transports.memory import MemoryTransport
from penstock.worker.worker import Worker
from tests.support.laid_out_engine import laid_out_engine

VOCAB = 500
BLOCK_SIZE = 4
TIMING = StepTiming(step_s=0.01, prefill_s_per_token=1e-3)
PRICES = Prices(
    prefill_step_s=0.01,
    prefill_token_s=1e-3,
    prefill_pair_s=0,
    decode_step_s=0.01,
    decode_sequence_s=1e-5,
    decode_token_s=0,
    onboard_token_s=(0.0, 0.0, 0.0, 0.0),
)
_CONFIG = MockConfig(timing=TIMING, answer_tokens=1000)
_CHUNK_TOKENS = 64


def tiny_engine(
    kv_blocks: int = 200,
    kv_bytes: int = 64,
    *,
    block_size: int = BLOCK_SIZE,
    chunk_tokens: int = _CHUNK_TOKENS,
    places: int = 64,
    make_tiers: TierMaker | None = None,
) -> BatchedEngine:
    """Make a mock engine that checks every read of KV (unless `kv_bytes` is 0)."""
    scheduling = SchedulerConfig(max_batch_tokens=chunk_tokens, max_running_requests=places)
    shape = _shape(kv_blocks, kv_bytes, block_size)
    return mock_engine(shape, _CONFIG, scheduling, make_tiers=make_tiers)


def tiny_laid_out_engine(
    layout: KvLayout, kv_blocks: int = 200, *, chunk_tokens: int = _CHUNK_TOKENS
) -> BatchedEngine:
    """Make the same engine with this KV layout, and as many blocks in each rank."""
    scheduling = SchedulerConfig(max_batch_tokens=chunk_tokens)
    return laid_out_engine(layout, _shape(kv_blocks, 0), _CONFIG, scheduling)


def _shape(kv_blocks: int, kv_bytes: int, block_size: int = BLOCK_SIZE) -> RunnerInfo:
    return RunnerInfo(
        num_blocks=kv_blocks,
        block_size=block_size,
        context_length=400,
        vocab_size=VOCAB,
        kv_bytes_per_block=kv_bytes,
    )


def tiny_request(
    name: str, length: int = 50, max_tokens: int = 20, seed: int = 0, logprobs: int | None = None
) -> Request:
    """Make a greedy request; prompts of equal seeds share a prefix."""
    return Request(
        request_id=RequestId(name),
        model="tiny",
        token_ids=pack_tokens([1 + (seed * 31 + 7 * index) % (VOCAB - 1) for index in range(length)]),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=logprobs),
    )


async def whole_answer(
    dispatcher: Dispatcher, request: Request
) -> tuple[list[int], FinishReason | None, int | None, int]:
    """Read an answer to its end; return tokens, finish reason, cached tokens and the number of logprobs."""
    tokens: list[int] = []
    cached: int | None = None
    last: Delta | None = None
    logprobs = 0
    async with dispatcher.open(request) as stream:
        async for delta in stream:
            tokens += unpack_tokens(delta.token_ids).tolist()
            cached = delta.cached_tokens if cached is None else cached
            logprobs += len(delta.logprobs)
            assert delta.kv is None, "a reader sees no handle"
            assert delta.finish_reason is not FinishReason.PREFILLED, "nor that there was one"
            last = delta
    return tokens, None if last is None else last.finish_reason, cached, logprobs


def check_nothing_is_held(worker: Worker, engine: BatchedEngine) -> None:
    """Raise AssertionError if a worker that has been idle for long still holds anything of a request."""
    worker.check()
    engine.scheduler.check()
    load = engine.load()
    assert load.active_blocks == 0, "blocks are held"
    assert load.failed_steps == 0, "steps failed, as those do that read KV of another prefix"
    kv_transfer = worker.kv_transfer
    if kv_transfer is not None:
        kv_transfer.check_idle()


class SlowTransport(MemoryTransport):
    """A transport that moves bytes some seconds after the post, and cannot be stopped in between, like a thread."""

    def __init__(self, delay_s: Callable[[int], float]) -> None:
        """Make a transport; `delay_s` returns the delay of a transfer of so many bytes."""
        super().__init__(threads=1, inline_bytes_max=1 << 20)
        self._delay_s = delay_s

    async def connect(
        self, link: Link | None, contact: bytes, regions: Mapping[int, RegionInfo]
    ) -> TransferChannel:
        return _SlowChannel(await super().connect(link, contact, regions), self._delay_s)


class _SlowChannel:
    def __init__(self, inner: TransferChannel, delay_s: Callable[[int], float]) -> None:
        self._inner = inner
        self._delay_s = delay_s

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        return self._inner.refusal(op, local, remote)

    def cost(self, op: TransferOp) -> TransferCost:
        return self._inner.cost(op)

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        return _SlowMove(self._inner.prepare(op, pairs, checksum=checksum), self._delay_s(pairs.total_bytes))

    def forget(self, region_id: int) -> None:
        self._inner.forget(region_id)

    async def close(self) -> None:
        await self._inner.close()


class _SlowMove:
    def __init__(self, inner: Move, delay_s: float) -> None:
        self._inner = inner
        self._delay_s = delay_s

    def run_now(self) -> bool:
        return False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._delay_s
        cancelled: asyncio.CancelledError | None = None
        while loop.time() < ends_s:
            try:
                await asyncio.sleep(ends_s - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
        self._inner.run_now()
        if cancelled is not None:
            raise cancelled
