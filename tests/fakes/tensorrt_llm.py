"""A fake `tensorrt_llm` and `tensorrt_llm.llmapi`: what the adapter uses, with the names, shapes and habits of 1.1.

`DisaggregatedParams` has `first_gen_log_probs`, as later versions; tests take it away.
"""

import asyncio
import dataclasses
import os
from itertools import count
from types import SimpleNamespace
from typing import Any

from penstock.core.types.events import AllBlocksCleared, BlockStored
from penstock.core.types.requests import FinishReason
from penstock.core.types.requests import SamplingParams as Sampling
from penstock.core.wire import unpack_hashes
from penstock.testing.engines.probe import EngineSetup
from tests.fakes.scheduler import FakeScheduler

MODEL = SimpleNamespace(vocab_size=256, context_length=256)
"""What a checkpoint says; tests set it."""
CALLS: list[dict[str, Any]] = []
"""Arguments of every `generate_async`."""
CONTEXTS: dict[int, bytes] = {}
"""KV of context requests that waits for its generation request, by context request id: its opaque state."""
ABORTED: list[int] = []
_ids = count(1)

_ARGUMENTS = """
    model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype revision
    pipeline_parallel_size context_parallel_size moe_tensor_parallel_size moe_expert_parallel_size enable_attention_dp
    enable_lora lora_config max_batch_size max_input_len max_seq_len max_beam_width max_num_tokens load_format
    enable_chunked_prefill kv_cache_config stream_interval cuda_graph_config attention_dp_config disable_overlap_scheduler
    moe_config attn_backend enable_iter_perf_stats cache_transceiver_config speculative_config backend print_iter_log
    allreduce_strategy gpus_per_node scheduler_config
"""


class TorchLlmArgs:
    model_fields = dict.fromkeys(_ARGUMENTS.split())


@dataclasses.dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")

    @property
    def is_greedy(self) -> bool:
        return self.top_k in (None, 1) and not self.top_p and not self.temperature


@dataclasses.dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None


class KvCacheRetentionConfig:
    class TokenRangeRetentionConfig:
        def __init__(self, token_start, token_end=None, priority=35, duration_ms=None):
            if not 0 <= priority <= 100:
                raise ValueError(f"Invalid priority {priority}")
            self.token_start, self.token_end = token_start, token_end
            self.priority, self.duration_ms = priority, duration_ms

    def __init__(
        self, token_range_retention_configs, decode_retention_priority=35, decode_duration_ms=None
    ) -> None:
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms


@dataclasses.dataclass(slots=True, kw_only=True)
class SchedulingParams:
    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclasses.dataclass
class CompletionOutput:
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None


class RequestOutput:
    """Both the future of a request and its state: an async iterator that yields itself."""

    def __init__(
        self, llm: "LLM", deltas: Any, params: SamplingParams, disaggregated: Any, streaming: bool
    ) -> None:
        self.request_id = next(_ids)
        self.outputs = [CompletionOutput()]
        self.cached_tokens = 0
        self._llm = llm
        self._deltas = deltas
        self._params = params
        self._disaggregated = disaggregated
        self._streaming = streaming
        self._done = False
        self.holder: list = []

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        if self._done:
            raise StopAsyncIteration
        while True:
            try:
                self._handle(await anext(self._deltas))
            except StopAsyncIteration:
                self.outputs[0].finish_reason = "cancelled"
                self._done = True
            if self._done or self._streaming:
                return self

    @property
    def _is_generation_only(self) -> bool:
        return self._disaggregated is not None and self._disaggregated.request_type == "generation_only"

    def abort(self) -> None:
        ABORTED.append(self.request_id)
        for request_id in self.holder:
            self._llm.scheduler.abort(request_id)

    def _handle(self, delta: Any) -> None:
        output = self.outputs[0]
        output.token_ids.extend(memoryview(delta.token_ids).cast("i") if delta.token_ids else ())
        self.cached_tokens = delta.cached_tokens or self.cached_tokens
        is_first = len(output.token_ids) == len(memoryview(delta.token_ids).cast("i"))
        for number, each in enumerate(delta.logprobs):
            if number == 0 and is_first and self._is_generation_only:
                output.logprobs += getattr(self._disaggregated, "first_gen_log_probs", None) or []
                continue  # it was generated elsewhere
            entry = {token_id: Logprob(value, rank + 1) for rank, (token_id, value) in enumerate(each.top)}
            output.logprobs.append(entry or {each.token_id: Logprob(each.logprob)})
        if self._params.logprobs is not None:
            assert len(output.logprobs) == len(output.token_ids)
        if delta.finish_reason is None:
            return
        self._done = True
        if delta.finish_reason is FinishReason.STOP:
            output.finish_reason = "stop"
            if output.token_ids[-1] in (self._params.stop_token_ids or ()):
                output.stop_reason = output.token_ids[-1]
            else:
                output.token_ids.pop()  # the end token is not part of the output
        else:
            output.finish_reason = "length"
        if self._disaggregated is not None and self._disaggregated.request_type == "context_only":
            output.finish_reason = (
                "not_finished" if output.finish_reason == "length" else output.finish_reason
            )
            CONTEXTS[self.request_id] = os.urandom(8)
            output.disaggregated_params = DisaggregatedParams(
                request_type="context_only",
                first_gen_tokens=list(output.token_ids),
                ctx_request_id=self.request_id,
                opaque_state=CONTEXTS[self.request_id],
            )
            if output.logprobs and hasattr(output.disaggregated_params, "first_gen_log_probs"):
                output.disaggregated_params.first_gen_log_probs = list(output.logprobs)


class IterationResult:
    """Yields what is queued, and ends after `timeout` seconds without anything; a new request lets it begin again."""

    def __init__(self, take: Any) -> None:
        self._take = take
        self.timeout = 2.0

    def __aiter__(self) -> "IterationResult":
        return self

    async def __anext__(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.timeout):
                return await self._take()
        except TimeoutError:
            raise StopAsyncIteration from None


def _named(low64: int) -> int:
    return low64 * 0x9E3779B97F4A7C15 % (1 << 64)


class LLM:
    def __init__(self, **kwargs: Any) -> None:
        unknown = kwargs.keys() - TorchLlmArgs.model_fields.keys()
        if unknown:
            raise ValueError(
                f"1 validation error for TorchLlmArgs\n{min(unknown)}\n  Extra inputs are not permitted"
            )
        self.args = SimpleNamespace(**kwargs)
        cache = kwargs["kv_cache_config"]
        block = cache["tokens_per_block"]
        setup = EngineSetup(
            block_size=block,
            kv_blocks=cache.get("max_tokens", 4096) // block,
            context_length=min(kwargs["max_seq_len"], MODEL.context_length),
            max_batch_tokens=kwargs.get("max_num_tokens", 8192),
            max_running_requests=kwargs.get("max_batch_size", 64),
            max_waiting_requests=100_000,
        )
        self.scheduler: FakeScheduler | None = None
        self._setup = setup
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._event_ids = count()
        self._has_events = bool(cache.get("enable_block_reuse") and cache.get("event_buffer_max_size"))
        self._executor = SimpleNamespace(is_shutdown=lambda: False)

    def generate_async(
        self,
        inputs,
        sampling_params=None,
        lora_request=None,
        prompt_adapter_request=None,
        streaming=False,
        kv_cache_retention_config=None,
        disaggregated_params=None,
        _postproc_params=None,
        scheduling_params=None,
        cache_salt=None,
    ) -> RequestOutput:
        if self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        params, token_ids = sampling_params, list(inputs["prompt_token_ids"])
        call = {"token_ids": token_ids, "params": params, "disaggregated": disaggregated_params}
        CALLS.append(call | {"retention": kv_cache_retention_config, "scheduling": scheduling_params})
        if params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if self.scheduler is None:
            ends = (params.end_id,) if params.end_id >= 0 else ()
            eos_token_ids = getattr(MODEL, "eos_token_ids", ends)
            self.scheduler = FakeScheduler(self._setup, MODEL.vocab_size, eos_token_ids)
            if self._has_events:
                created = {"type": "created", "num_blocks_per_cache_level": [self._setup.kv_blocks, 0]}
                self.events.put_nowait(
                    {"event_id": next(self._event_ids), "data": created, "window_size": 256}
                )
                self.scheduler.on_events = self._publish
        kind = disaggregated_params.request_type if disaggregated_params is not None else None
        if kind == "context_only":
            params.max_tokens = 1
        if kind == "generation_only" and CONTEXTS.pop(disaggregated_params.ctx_request_id, None) is None:
            raise RuntimeError("Failed to receive the KV cache of the context request")
        sampling = Sampling(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens or 0,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_p=params.top_p or 1.0,
            top_k=params.top_k,
            min_p=params.min_p or 0.0,
            seed=params.seed,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
        )
        result = RequestOutput(self, None, params, disaggregated_params, streaming)
        salt = (cache_salt or "").encode()
        result._deltas = self.scheduler.serve(token_ids, sampling, salt=salt, holder=result.holder)
        return result

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        async def take() -> dict[str, Any]:
            await asyncio.sleep(0.01)
            load = self.scheduler.engine.load()
            return {
                "iter": load.steps,
                "numActiveRequests": load.running_requests,
                "numQueuedRequests": load.waiting_requests,
                "kvCacheStats": {"maxNumBlocks": load.total_blocks, "usedNumBlocks": load.active_blocks},
            }

        stats = IterationResult(take)
        stats.timeout = timeout
        return stats

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        events = IterationResult(self.events.get)
        events.timeout = timeout
        return events

    def _publish(self, events) -> None:
        """Queue events as `get_kv_cache_events` tells them: each block by itself in older ones, hashes of its own making."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                continue
            hashes = unpack_hashes(event.block_hashes).tolist()
            data: dict[str, Any] = {"type": "removed", "block_hashes": [_named(low64) for low64 in hashes]}
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                data = {
                    "type": "stored",
                    "parent_hash": None if parent is None else _named(parent),
                    "blocks": [self._block(low64) for low64 in hashes],
                }
            self.events.put_nowait({"event_id": next(self._event_ids), "data": data, "window_size": 256})

    def _block(self, low64: int) -> dict[str, Any]:
        assert self.scheduler is not None
        tokens = [
            {"type": "unique_token", "token_id": token_id, "token_extra_id": 0}
            for token_id in self.scheduler.tokens_of[low64][0]
        ]
        return {
            "type": "stored_block",
            "block_hash": _named(low64),
            "tokens": tokens,
            "cache_level": 0,
            "priority": 35,
        }

    def shutdown(self) -> None:
        self._executor = SimpleNamespace(is_shutdown=lambda: True)
        if self.scheduler is not None:
            self.scheduler.stop()
