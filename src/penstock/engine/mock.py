"""The mock engine: synthetic tokens, real scheduling, blocks and KV events, and step times from a formula.

The token at an output position depends on (prompt, adapter, seed, choice, position) only, so a request that moves to
another worker continues with the same tokens. At temperature 0, seed and choice have no influence.

The engine's KV memory stores for each token a digest of the prefix that ends there, not keys and values. So every step checks
block tables, prefix sharing, chunked prefill, preemption and KV transfers without a model: reading KV of another prefix is an
error, where a real model would only answer nonsense.
"""

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from pydantic import Field

from penstock.core.config import Config
from penstock.core.errors import ConfigError, EngineError
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.ids import RequestId
from penstock.core.types.instances import EngineInfo, Prices
from penstock.core.types.kv import KvLayout, RankLayout
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import PromptLogprobs, Request, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.engine.batched import BatchedEngine
from penstock.engine.kv_tiers import TierMaker
from penstock.engine.runner import RunnerInfo, end_tokens_within
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.sequences import (
    PromptSpan,
    Sampled,
    SequenceTable,
    StepPlan,
    position_keys,
    prompt_spans,
)
from penstock.kv.eviction import PrefillPrice

Positions = NDArray[np.integer[Any]]

_CELL_BYTES = 8
_BASE = 0x9E3779B97F4A7C15
"""Odd, so that its powers never vanish modulo 2^64; the golden ratio's bits."""


class MockKv:
    """Blocks of `kv_bytes_per_block`, whose first 8 bytes per token are the digest of the prefix that ends there.

    The digest of tokens t is the sum of (t[i] + 1) * base^i modulo 2^64: sums of many prefixes are one array operation.
    """

    def __init__(self, shape: RunnerInfo) -> None:
        self._block_size = shape.block_size
        self.memory = np.zeros((shape.num_blocks, shape.kv_bytes_per_block), dtype=np.uint8)
        """(num_blocks, kv_bytes_per_block); KV transfers read and write it."""
        self.layout = _layout(shape)
        self._cells = self.memory[:, : self.bytes_needed(shape.block_size)].view("<u8")
        powers = np.full(shape.context_length, _BASE, dtype=np.uint64)
        powers[0] = 1
        self._powers = np.cumprod(powers)
        self._digests = np.zeros(0, dtype=np.uint64)  # (slots,), digest of the computed tokens

    @staticmethod
    def bytes_needed(block_size: int) -> int:
        """Return the bytes that the digests of a block take."""
        return block_size * _CELL_BYTES

    def compute(self, plan: StepPlan, table: SequenceTable) -> None:
        """Check the digests of all tokens that the planned tokens attend to, and write those of the planned tokens.

        Raises:
            EngineError: a block holds KV of another prefix.
        """
        if len(self._digests) < len(table.requests):
            self._digests = np.zeros(len(table.requests), dtype=np.uint64)
        for row in range(plan.num_decode, len(plan.slots)):
            self._prefill(table, int(plan.slots[row]), int(plan.num_new[row]))
        slots = plan.slots[: plan.num_decode]
        position = table.num_computed[slots]
        before = self._cells[self._cell_of(table, slots, position - 1)]
        self._expect(before, self._digests[slots], slots)
        digests = before + self._terms(table.token_ids[slots, position], position)
        self._cells[self._cell_of(table, slots, position)] = digests
        self._digests[slots] = digests

    def _prefill(self, table: SequenceTable, slot: int, num_new: int) -> None:
        start = int(table.num_computed[slot])
        position = np.arange(start + num_new)
        digests = np.cumsum(self._terms(table.token_ids[slot, : start + num_new], position))
        cells = self._cell_of(table, np.full(len(position), slot), position)
        self._expect(self._cells[cells][:start], digests[:start], np.full(start, slot))
        self._cells[cells] = digests
        self._digests[slot] = digests[-1]

    def _terms(self, token_ids: NDArray[np.int32], position: Positions) -> NDArray[np.uint64]:
        terms: NDArray[np.uint64] = (token_ids.astype(np.uint64) + np.uint64(1)) * self._powers[position]
        return terms

    def _cell_of(
        self, table: SequenceTable, slots: NDArray[np.int32], position: Positions
    ) -> tuple[NDArray[np.int32], Positions]:
        return table.block_tables[slots, position // self._block_size], position % self._block_size

    def _expect(
        self, found: NDArray[np.uint64], expected: NDArray[np.uint64], slots: NDArray[np.int32]
    ) -> None:
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            slot = int(slots[wrong[0]])
            raise EngineError(f"slot {slot}: the KV of {len(wrong)} tokens belongs to other prefixes")


def _layout(shape: RunnerInfo) -> KvLayout:
    """Describe a block as tokens of equal size; bytes left at its end are unused and not transferred."""
    token_bytes = shape.kv_bytes_per_block // shape.block_size
    rank = RankLayout(
        layers=(0,),
        heads=(0,),
        num_blocks=shape.num_blocks,
        order="| block layer kv token head",
        strides_bytes=(shape.kv_bytes_per_block, 0, 0, token_bytes, 0),
    )
    return KvLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=token_bytes,
        dtype="digests",
        element_bytes=1,
        block_size=shape.block_size,
        ranks=(rank,),
        planes=1,
    )


_SLEEP_S_MIN = 0.001
"""Shorter sleeps are saved up: timers are no finer, and cost more than such a step."""
_OVERSLEPT_S_MAX = 0.005
"""Oversleeping shortens later sleeps by at most this, so that a process that was stopped does not hurry afterwards."""
_BETWEEN_S_MAX = 0.002
"""A gap between steps up to this counts as part of the next step; after a longer gap the engine was idle."""
_ENDLESS = np.iinfo(np.int32).max


class StepTiming(Config):
    """Duration of a step, in seconds. The defaults are an 8B model in fp8 on one H200, by `perf.Roofline`."""

    step_s: float = Field(default=0.0035, ge=0)
    """Every step: reading the weights."""
    prefill_s_per_token: float = Field(default=14e-6, ge=0)
    """Every prompt token computed."""
    prefill_s_per_token2: float = Field(default=0.65e-9, ge=0)
    """Every pair of a prompt token computed and a token before it."""
    decode_s_per_request: float = Field(default=6e-6, ge=0)
    """Every decoding request."""
    decode_s_per_context_token: float = Field(default=15e-9, ge=0)
    """Every token in the context of a decoding request: reading its KV."""

    def seconds(self, plan: StepPlan, table: SequenceTable) -> float:
        """Return the duration of a step."""
        computed = table.num_computed[plan.slots]
        new, cached = plan.num_new[plan.num_decode :], computed[plan.num_decode :]
        prefill = self.prefill_s_per_token * float(new.sum())
        if len(new):
            prefill += self.prefill_s_per_token2 * float(np.dot(new.astype(np.float64), cached + new / 2))
        context = float(computed[: plan.num_decode].sum())
        decode = self.decode_s_per_request * plan.num_decode + self.decode_s_per_context_token * context
        return self.step_s + prefill + decode


class MockConfig(Config):
    """Timing and answers of a mock engine."""

    speedup: float = Field(default=1.0, gt=0)
    """Steps are this many times faster than `timing` says."""
    timing: StepTiming = StepTiming()
    """Duration of a step at speedup 1."""
    answer_tokens: int = Field(default=64, ge=1)
    """Mean length of an answer that ends by itself; the prompt decides between half and one and a half times this."""
    first_token_id: int = Field(default=300, ge=0)
    """Smallest token id of answers, to skip a tokenizer's special tokens and single bytes; at most half the ids are skipped."""
    kv_bytes_per_block: int = Field(default=0, ge=0)
    """KV memory of a block, to test transfers and check their content: 0, or at least 8 bytes per token."""

    def prices(self) -> Prices:
        """Convert `timing` and `speedup` to the prices that a worker registers."""
        timing, speedup = self.timing, self.speedup
        return Prices(
            prefill_step_s=timing.step_s / speedup,
            prefill_token_s=timing.prefill_s_per_token / speedup,
            prefill_pair_s=timing.prefill_s_per_token2 / speedup,
            decode_step_s=timing.step_s / speedup,
            decode_sequence_s=timing.decode_s_per_request / speedup,
            decode_token_s=timing.decode_s_per_context_token / speedup,
        )


class MockText:
    """Generates synthetic tokens. Per-slot state is valid while the table holds the same request object in the slot."""

    def __init__(self, shape: RunnerInfo, config: MockConfig, slots: int) -> None:
        first = min(config.first_token_id, shape.vocab_size // 2)
        words = np.arange(first, shape.vocab_size, dtype=np.int32)
        self._words = words[~np.isin(words, shape.eos_token_ids)]
        self._eos = shape.eos_token_ids[0] if shape.eos_token_ids else None
        self._answer_tokens = config.answer_tokens
        self._requests: list[Request | None] = [None] * slots
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._ends = np.zeros(slots, dtype=np.int32)  # output position of the end-of-sequence token
        self._wants_logprobs = np.zeros(slots, dtype=np.bool_)

    def sample(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        """Sample a token for each row of the plan where `plan.samples`."""
        for slot in plan.slots[plan.num_decode :].tolist():
            request = table.requests[slot]
            if request is not None and request is not self._requests[slot]:
                self._begin(slot, request, table.token_ids[slot, : table.num_prompt[slot]].tobytes())
        slots = plan.slots
        position = table.num_tokens[slots] - table.num_prompt[slots]
        noise = position_keys(self._seeds[slots], position)
        token_ids = self._words[noise % np.uint64(len(self._words))]
        if self._eos is not None:
            token_ids[position >= self._ends[slots]] = self._eos
        token_ids[~plan.samples] = -1
        asked = np.flatnonzero(self._wants_logprobs[slots] & plan.samples)
        return Sampled(
            token_ids,
            {
                row: self._logprob(int(slots[row]), int(token_ids[row]), int(noise[row]))
                for row in asked.tolist()
            },
            prompt_logprobs={span.row: self._prompt(span, table) for span in prompt_spans(plan, table)},
        )

    def _begin(self, slot: int, request: Request, prompt: bytes) -> None:
        sampling = request.sampling
        noise = (sampling.seed, request.choice) if sampling.temperature > 0 else None
        if request.adapter is not None:
            prompt += b"|" + request.adapter.encode()
        digest = hashlib.blake2b(prompt, digest_size=16, key=repr(noise).encode()).digest()
        length = self._answer_tokens // 2 + int.from_bytes(digest[8:], "little") % self._answer_tokens
        self._requests[slot] = request
        self._seeds[slot] = int.from_bytes(digest[:8], "little")
        self._ends[slot] = _ENDLESS if sampling.ignore_eos else max(length, sampling.min_tokens)
        self._wants_logprobs[slot] = sampling.logprobs is not None

    def _prompt(self, span: PromptSpan, table: SequenceTable) -> PromptLogprobs:
        """Give each token of the prompt probability 1/2, the first alternative after it 1/4, and so on."""
        targets = table.token_ids[span.slot, span.start : span.end]
        ranks = np.arange(min(span.alternatives, len(self._words)))
        others = self._words[
            (targets[:, None] + np.arange(span.start, span.end)[:, None] + ranks[1:]) % len(self._words)
        ]
        columns = (targets[:, None], targets[:, None], others) if len(ranks) else (targets[:, None],)
        token_ids = np.concatenate(columns, axis=1)
        halvings = np.concatenate(([1], 1 + ranks)).astype("<f4")
        logprobs = np.broadcast_to(-math.log(2) * halvings, token_ids.shape)
        return PromptLogprobs(
            start=span.start,
            token_ids=pack_tokens(token_ids),
            logprobs=logprobs.astype("<f4").tobytes(),
            ranks=pack_tokens(np.ones(len(targets), dtype=np.int32)),
        )

    def _logprob(self, slot: int, token_id: int, noise: int) -> TokenLogprob:
        """Give the sampled token probability 1/2, the first alternative 1/4, and so on."""
        request = self._requests[slot]
        assert request is not None, "begun"
        number = min(request.sampling.logprobs or 0, len(self._words))
        others = (int(self._words[(noise + rank) % len(self._words)]) for rank in range(1, number))
        top = tuple((other, -(rank + 1) * math.log(2)) for rank, other in enumerate((token_id, *others)))
        return TokenLogprob(token_id, top[0][1], top[:number])


class MockRunner:
    """A `Runner` that computes nothing; its steps take as long as `MockConfig.timing` says."""

    def __init__(self, shape: RunnerInfo, config: MockConfig) -> None:
        self._shape = shape
        self._config = config
        self._text: MockText | None = None
        self._kv: MockKv | None = None  # None: no KV memory
        self._owed_s = 0.0
        self._ended_s = float("-inf")  # end of the last step

    async def start(self) -> RunnerInfo:
        """Check the settings.

        Raises:
            ConfigError: `kv_bytes_per_block` or `vocab_size` is too small.
        """
        eos_token_ids = end_tokens_within(self._shape.vocab_size, self._shape.eos_token_ids)
        shape = self._shape = replace(
            self._shape, eos_token_ids=eos_token_ids, sampling_fields=("prompt_logprobs",)
        )
        needed = MockKv.bytes_needed(shape.block_size)
        if 0 < shape.kv_bytes_per_block < needed:
            raise ConfigError(
                f"kv_bytes_per_block: must be 0 or >= {needed} for blocks of {shape.block_size} tokens, "
                f"got {shape.kv_bytes_per_block}"
            )
        if shape.vocab_size <= 2 * len(shape.eos_token_ids):
            raise ConfigError(
                f"vocab_size: must leave tokens beside the {len(shape.eos_token_ids)} that end a text, "
                f"got {shape.vocab_size}"
            )
        if shape.kv_bytes_per_block:
            self._kv = MockKv(shape)
            return replace(shape, kv_layout=self._kv.layout)
        return shape

    async def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        if self._text is None:
            self._text = MockText(self._shape, self._config, slots=len(table.requests))
        if self._kv is not None:
            self._kv.compute(plan, table)
        sampled = self._text.sample(plan, table)
        await self._spend(self._config.timing.seconds(plan, table) / self._config.speedup)
        return sampled

    def kv_memory(self) -> Sequence[Sequence[object]]:
        return () if self._kv is None else ((self._kv.memory,),)

    async def close(self) -> None:
        """Release the KV memory."""
        self._kv = None

    async def _spend(self, seconds: float) -> None:
        """Sleep for the duration of a step.

        Sleeps that are too short are added up, oversleeping is subtracted from later sleeps. Time between two steps counts
        as part of the next step, since real engines plan and send tokens while the device computes.
        """
        now_s = asyncio.get_running_loop().time
        start_s = now_s()
        between_s = start_s - self._ended_s
        self._owed_s += seconds - (between_s if between_s < _BETWEEN_S_MAX else 0.0)
        if self._owed_s < _SLEEP_S_MIN:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(self._owed_s)
        self._ended_s = now_s()
        self._owed_s = max(self._owed_s - (self._ended_s - start_s), -_OVERSLEPT_S_MAX)


class MockEngine(BatchedEngine):
    """A `BatchedEngine` that implements `Sleeping`: all it has to give up is its prefix cache."""

    def check_sleep(self, level: int) -> None:
        """Sleep at every level."""

    async def sleep(self, level: int) -> None:  # noqa: ARG002 - it has no weights
        self.clear_cache()

    async def wake_up(self) -> None:
        """Have nothing to take again."""


def mock_engine(
    shape: RunnerInfo,
    config: MockConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    *,
    hash_key: bytes = DEFAULT_KEY,
    make_tiers: TierMaker | None = None,
) -> MockEngine:
    """Make a mock engine.

    Args:
        shape: sizes of the model and its pool; with `kv_bytes_per_block` 0 there is no KV memory.
        config: timing and answers.
        scheduler: bounds of batch and queue.
        hash_key: the deployment's key for block hashes.
        make_tiers: makes the KV tiers below its device; None without.
    """
    config = config or MockConfig()
    runner = MockRunner(shape, config)
    timing = config.timing
    price = PrefillPrice(timing.prefill_s_per_token, timing.prefill_s_per_token2)
    return MockEngine(runner, scheduler, hash_key=hash_key, make_tiers=make_tiers, price=price)


class MockRanks:
    """Implements `Engine`, `Announcing` and `Sleeping` over one mock engine for each rank. One event loop owns it.

    Real ranks with shared experts step together; these do not wait for each other. They transfer no KV.
    """

    def __init__(self, ranks: Sequence[MockEngine]) -> None:
        """Make an engine of ranks that are not started."""
        self._ranks = ranks
        self._rank_of: dict[RequestId, int] = {}
        """Of requests that have not ended."""
        self._steps: asyncio.Queue[Step | Exception | None] = asyncio.Queue(maxsize=len(ranks))

    async def start(self) -> EngineInfo:
        """Start all ranks; gives the sizes of one.

        Raises:
            ConfigError: a setting cannot work.
        """
        info, *_ = [await rank.start() for rank in self._ranks]
        return structs.replace(info, data_parallel=len(self._ranks), kv_layout=None)

    def submit(self, request: Request) -> None:
        """Queue a request at its rank; one without a rank goes to the rank with the fewest."""
        rank = self._rank_of.get(
            request.request_id, request.rank
        )  # a rank refuses an id that is under way there
        if rank is None:
            counts = Counter(self._rank_of.values())
            rank = min(range(len(self._ranks)), key=counts.__getitem__)
        self._ranks[rank].submit(request)
        self._rank_of[request.request_id] = rank

    def abort(self, request_id: RequestId) -> None:
        rank = self._rank_of.pop(request_id, None)
        if rank is not None:
            self._ranks[rank].abort(request_id)

    async def steps(self) -> AsyncIterator[Step]:
        """Yield the steps of all ranks as they come, until `close`.

        Raises:
            EngineError: a rank's steps failed too often: all end.
        """
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._run(number)) for number in range(len(self._ranks))]
            try:
                while (item := await self._steps.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    for delta in item.deltas:
                        if delta.finish_reason is not None:
                            self._rank_of.pop(delta.request_id, None)
                    yield structs.replace(item, load=self.load())
            finally:
                for each in running:
                    each.cancel()

    def announce(self, listener: Callable[[Sequence[RequestId]], None]) -> None:
        for rank in self._ranks:
            rank.announce(listener)

    def load(self) -> WorkerLoad:
        return WorkerLoad.of_ranks([rank.load() for rank in self._ranks])

    def check_sleep(self, level: int) -> None:
        """Sleep at every level."""

    async def sleep(self, level: int) -> None:
        for rank in self._ranks:
            await rank.sleep(level)

    async def wake_up(self) -> None:
        """Have nothing to take again."""

    async def close(self) -> None:
        for rank in self._ranks:
            await rank.close()

    async def _run(self, number: int) -> None:
        """Pass on the steps of one rank, then the error that ended them, or None after `close`."""
        end: Exception | None = None
        try:
            async for step in self._ranks[number].steps():
                await self._steps.put(structs.replace(step, rank=number))
        except Exception as error:  # noqa: BLE001 - the reader of the steps gets it
            end = error
        await self._steps.put(end)
