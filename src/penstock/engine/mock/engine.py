"""An engine without a model: synthetic tokens, real scheduling, blocks and KV events, step times from a formula.

The token at an output position depends on (prompt, adapter, seed, choice, position) only, so a request that moves to
another worker continues with the same tokens. At temperature 0, seed and choice have no influence.
"""

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.types.instances import Prices
from penstock.core.types.requests import PromptLogprobs, Request, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.engine.batched import BatchedEngine
from penstock.engine.kv_tiers import TierMaker
from penstock.engine.mock.kv import MockKv
from penstock.engine.runner import RunnerInfo, end_tokens_within
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.sampling import position_keys
from penstock.engine.scheduling.sequences import PromptSpan, Sampled, SequenceTable, StepPlan, prompt_spans
from penstock.kv.eviction import PrefillPrice

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
