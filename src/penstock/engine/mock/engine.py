"""An engine without a model: made-up text, honest scheduling, blocks and events, and time from a small formula.

The token at an output position is a function of (prompt, adapter, seed, choice, position) only, so that a request which
moves to another worker goes on exactly; with temperature 0 seed and choice play no part.
"""

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.types.instances import Prices
from penstock.core.types.requests import Request, TokenLogprob
from penstock.engine.batched import BatchedEngine
from penstock.engine.mock.kv import MockKv
from penstock.engine.runner import RunnerInfo, end_tokens_within
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.sequences import Sampled, SequenceTable, StepPlan

_SLEEP_S_MIN = 0.001
"""Less is saved up: timers are no finer, and cost more than such a step."""
_OVERSLEPT_S_MAX = 0.005
"""What sleeping too long gives back at most, so that a process that was stopped does not hurry afterwards."""
_BETWEEN_S_MAX = 0.002
"""Longest time between steps that belongs to the next one; after more, the engine was idle."""
_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment, the golden ratio's bits
_ENDLESS = np.iinfo(np.int32).max


class StepTiming(Config):
    """How long a step takes, in seconds. The defaults are an 8B model in fp8 on one H200, by `perf.Roofline`."""

    step_s: float = Field(default=0.0035, ge=0)
    """Every step: reading the weights."""
    prefill_s_per_token: float = Field(default=14e-6, ge=0)
    """Every prompt token computed."""
    prefill_s_per_token2: float = Field(default=0.65e-9, ge=0)
    """Every pair of a prompt token computed and a token before it."""
    decode_s_per_request: float = Field(default=6e-6, ge=0)
    """Every request that gets its next token."""
    decode_s_per_context_token: float = Field(default=15e-9, ge=0)
    """Every token in the context of such a request: reading its KV."""

    def seconds(self, plan: StepPlan, table: SequenceTable) -> float:
        """Price a step."""
        computed = table.num_computed[plan.slots]
        new, cached = plan.num_new[plan.num_decode :], computed[plan.num_decode :]
        prefill = self.prefill_s_per_token * float(new.sum())
        if len(new):
            prefill += self.prefill_s_per_token2 * float(np.dot(new.astype(np.float64), cached + new / 2))
        context = float(computed[: plan.num_decode].sum())
        decode = self.decode_s_per_request * plan.num_decode + self.decode_s_per_context_token * context
        return self.step_s + prefill + decode


class MockConfig(Config):
    """How a mock engine behaves."""

    speedup: float = Field(default=1.0, gt=0)
    """How many times faster than `timing` its clock runs."""
    timing: StepTiming = StepTiming()
    """How long a step takes at speedup 1."""
    answer_tokens: int = Field(default=64, ge=1)
    """Tokens in a usual answer, which ends by itself; the prompt decides between half and one and a half times this."""
    first_token_id: int = Field(default=300, ge=0)
    """Answers are made of ids from here on, past a tokenizer's special tokens and single bytes (at most half the ids are left out)."""
    kv_bytes_per_block: int = Field(default=0, ge=0)
    """Memory kept for each KV block, to move and to check: 0, or at least 8 bytes a token."""

    def prices(self) -> Prices:
        """Say what routers have to know of `timing`."""
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
    """Makes up answers. State by slot is valid while the table holds the same request object there."""

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
        """Pick the planned rows' tokens."""
        for slot in plan.slots[plan.num_decode :].tolist():
            request = table.requests[slot]
            if request is not None and request is not self._requests[slot]:
                self._begin(slot, request, table.token_ids[slot, : table.num_prompt[slot]].tobytes())
        slots = plan.slots
        position = table.num_tokens[slots] - table.num_prompt[slots]
        noise = _mix(self._seeds[slots] + position.astype(np.uint64) * _STEP)
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

    def _logprob(self, slot: int, token_id: int, noise: int) -> TokenLogprob:
        """Give the chosen token half of all probability, the first alternative a quarter, and so on."""
        request = self._requests[slot]
        assert request is not None, "begun"
        number = min(request.sampling.logprobs or 0, len(self._words))
        others = (int(self._words[(noise + rank) % len(self._words)]) for rank in range(1, number))
        top = tuple((other, -(rank + 1) * math.log(2)) for rank, other in enumerate((token_id, *others)))
        return TokenLogprob(token_id, top[0][1], top[:number])


class MockRunner:
    """A `Runner` that computes nothing, and takes as long as `MockConfig.timing` says."""

    def __init__(self, shape: RunnerInfo, config: MockConfig) -> None:
        self._shape = shape
        self._config = config
        self._text: MockText | None = None
        self._kv: MockKv | None = None  # None keeps no memory for blocks
        self._owed_s = 0.0
        self._ended_s = float("-inf")  # when the last step did

    async def start(self) -> RunnerInfo:
        """Check the settings.

        Raises:
            ConfigError: they contradict each other.
        """
        eos_token_ids = end_tokens_within(self._shape.vocab_size, self._shape.eos_token_ids)
        shape = self._shape = replace(self._shape, eos_token_ids=eos_token_ids)
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
        """Forget the memory."""
        self._kv = None

    async def _spend(self, seconds: float) -> None:
        """Let time pass; what is too short to sleep is owed, what a sleep was too long is given back.

        Planning and handing out between two steps passes as part of the next one, as engines do it while the
        device computes.
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


def mock_engine(
    shape: RunnerInfo,
    config: MockConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    *,
    hash_key: bytes = DEFAULT_KEY,
) -> BatchedEngine:
    """Make a mock engine.

    Args:
        shape: what a model would say of itself; `kv_bytes_per_block` 0 keeps no memory for blocks.
        config: how it behaves.
        scheduler: how much it takes on at once.
        hash_key: the deployment's key for block hashes.
    """
    return BatchedEngine(MockRunner(shape, config or MockConfig()), scheduler, hash_key=hash_key)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter consecutive numbers over all 64 bits.

    Source: SplitMix64's finaliser; Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
