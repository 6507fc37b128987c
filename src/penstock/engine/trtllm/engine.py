"""TensorRT-LLM behind `seams.Engine`: starts it, gives it calls, and polls its load and KV events."""

import asyncio
import importlib
import inspect
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from penstock.core.errors import ConfigError, RequestError, StepFailed
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent
from penstock.core.wire import encode
from penstock.engine.spec import EngineSpec
from penstock.engine.streams.backend import Call, Output, Serving
from penstock.engine.streams.engine import StreamedEngine
from penstock.engine.streams.package import check_gpu, first_line, supported
from penstock.engine.trtllm.arguments import PACKAGE, argument_names, make_arguments, visible_devices
from penstock.engine.trtllm.events import PolledCache
from penstock.engine.trtllm.outputs import (
    FIRST_LOGPROBS,
    Context,
    read_result,
    retention_config,
    sampling_arguments,
)
from penstock.kv.sessions.retention import check_retention

_log = get_logger()

KV_TRANSFER_KIND = "trtllm-context-1"
_RUNNING_DEFAULT = 2048
_CHUNK_DEFAULT = 8192
"""TensorRT-LLM's own defaults of max_batch_size and max_num_tokens, for each rank."""
_POLL_S = 0.05
_EVENTS_AT_ONCE = 1000
_STATS_TIMEOUT_S = 2.0
_HEALTH_EVERY_S = 1.0


class TrtllmEngine(StreamedEngine):
    """Implements `Engine` and `NativeKvTransfer` with TensorRT-LLM."""

    def __init__(self, spec: EngineSpec) -> None:
        """Make an engine; `start` imports TensorRT-LLM and loads the model."""
        super().__init__(
            TrtllmBackend(spec),
            max_waiting_requests=spec.scheduler.max_waiting_requests,
            hash_key=spec.hash_key,
        )

    def kv_transfer_kind(self) -> str:
        return KV_TRANSFER_KIND


class TrtllmBackend:
    """Implements `Backend` with `tensorrt_llm.LLM`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._llm: Any = None
        self._api: Any = None
        """Module `tensorrt_llm.llmapi`."""
        self._ranks_api: Any = None
        """Module `tensorrt_llm.scheduling_params`, with several data-parallel ranks."""
        self._parameters: frozenset[str] = frozenset()
        """Keyword arguments that the installed `generate_async` has."""
        self._disaggregated_fields: frozenset[str] = frozenset()
        """Fields of the installed `DisaggregatedParams`."""
        self._results: dict[int, Any] = {}
        self._cache = PolledCache(spec)
        self._reuses_blocks = True
        self._stats: dict[str, Any] = {}
        """The latest statistics of an iteration."""

    async def start(self) -> Serving:
        """Start the ranks and load the model; one token is generated, to see that it answers.

        Raises:
            ConfigError: TensorRT-LLM is missing, does not fit, or cannot start.
        """
        spec = self._spec
        os.environ.update(visible_devices(spec, os.environ))
        PACKAGE.load()
        check_gpu("trtllm", spec.device)
        try:
            self._api = importlib.import_module("tensorrt_llm.llmapi")
        except ImportError as error:
            raise ConfigError(
                f"engine trtllm: {first_line(error)}; reinstall with `{PACKAGE.install}`"
            ) from error
        self._disaggregated_fields = frozenset(inspect.signature(self._api.DisaggregatedParams).parameters)
        arguments = make_arguments(spec, argument_names(self._api))
        if spec.data_parallel > 1:
            self._ranks_api = importlib.import_module("tensorrt_llm.scheduling_params")
        cache = arguments["kv_cache_config"]
        self._reuses_blocks = bool(cache["enable_block_reuse"] and cache["event_buffer_max_size"])
        try:
            self._llm = await asyncio.to_thread(self._api.LLM, **arguments)
            self._parameters = frozenset(inspect.signature(self._llm.generate_async).parameters)
            await self._warm_up()
        except Exception as error:
            raise ConfigError(
                f"engine trtllm: cannot start {spec.model}: {first_line(error)}; TensorRT-LLM's own lines above say more,"
                " and engine_args sets its arguments"
            ) from error
        if "cache_salt" not in self._parameters:
            raise ConfigError(
                "engine trtllm: the installed version has no cache_salt, which separates the prompts of tenants; run"
                f" `{PACKAGE.install} --upgrade`"
            )
        return self._serving()

    def check(self, call: Call) -> None:
        """Take every call whose KV has no TTL beyond the bound: decode workers can compute prompts.

        Raises:
            RequestError: the TTL is longer than `sessions.ttl_s_max`.
        """
        check_retention(call.request, self._spec.scheduler.sessions)

    async def generate(self, call: Call) -> AsyncGenerator[Output, None]:
        request, eos = call.request, self._spec.eos_token_ids
        self._cache.expect(call.token_ids, call.salt)
        disaggregated = self._disaggregated(call)
        kwargs = {
            "sampling_params": self._api.SamplingParams(**sampling_arguments(call, eos)),
            "disaggregated_params": disaggregated,
            "cache_salt": call.salt,
            "kv_cache_retention_config": self._retention(call),
            "streaming": not request.prefill_only,
            "scheduling_params": self._scheduling(call.rank),
        }
        try:
            result = self._llm.generate_async(
                {"prompt_token_ids": call.token_ids}, **supported(kwargs, self._parameters)
            )
        except (ValueError, TypeError) as error:
            raise RequestError(f"trtllm refuses the request: {first_line(error)}") from error
        self._results[call.number] = result
        try:
            async for state in result:
                if call.is_dropped:
                    result.abort()  # now that its KV has come: an abort during the transfer is not safe
                    return
                output = read_result(state, call, eos)
                if output is None:
                    return
                params = state.outputs[0].disaggregated_params
                if request.prefill_only and output.finish_reason is not None and params is not None:
                    yield _prefilled(output, params)
                    output = Output(cached_tokens=output.cached_tokens)
                yield output
        except Exception as error:
            raise StepFailed(f"trtllm failed on this request: {first_line(error)}") from error
        finally:
            del self._results[call.number]

    def cancel(self, call: Call) -> None:
        result = self._results.get(call.number)
        is_loading = call.request.kv is not None and not call.num_generated
        if result is not None and not is_loading:
            result.abort()

    async def events(self) -> AsyncIterator[tuple[int, Sequence[KvEvent]]]:
        """Poll the KV events of all ranks."""
        while True:
            polled = []
            async for event in self._llm.get_kv_cache_events_async(timeout=_POLL_S):
                polled.append(event)
                if len(polled) >= _EVENTS_AT_ONCE:
                    break
            for rank, events in self._cache.translate(polled):
                yield rank, events
            if not polled:
                await asyncio.sleep(_POLL_S)  # until a new request its iterator ends at once

    async def active_blocks(self) -> Sequence[int] | None:
        """Read TensorRT-LLM's statistics, which tell of one rank."""
        if self._spec.data_parallel > 1:
            return None
        await self._read_stats(_POLL_S)
        used = self._stats.get("kvCacheStats", {}).get("usedNumBlocks")
        return None if used is None else [int(used)]

    async def died(self) -> str:
        """Watch the executor, whose streams just stop when it is gone."""
        while not self._is_shut_down():  # noqa: ASYNC110 - it is asked, it does not tell
            await asyncio.sleep(_HEALTH_EVERY_S)
        return "trtllm: its executor shut down; TensorRT-LLM's own lines above say why"

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    def _retention(self, call: Call) -> Any:
        retention = call.request.retention
        if retention is None:
            return None
        return retention_config(self._api, retention, self._spec.scheduler.sessions.ttl_s)

    def _scheduling(self, rank: int) -> Any:
        """Give the rank that computes a request; None where there is one."""
        if self._spec.data_parallel == 1:
            return None
        return self._ranks_api.SchedulingParams(attention_dp_rank=rank, attention_dp_relax=False)

    def _disaggregated(self, call: Call) -> Any:
        """Make the parameters of a context or generation request, of the fields that the installed version has.

        None where the request asks for logprobs and its first token's cannot be passed on: then a prefill worker generates
        that token, and a decode worker computes the prompt itself.
        """
        request, names = call.request, self._disaggregated_fields
        asks_logprobs = call.sampling.logprobs is not None
        if request.prefill_only:
            if asks_logprobs and FIRST_LOGPROBS not in names:
                return None
            return self._api.DisaggregatedParams(request_type="context_only")
        context = Context.read(request.kv)
        if context is None or (
            asks_logprobs and (context.first_gen_log_probs is None or FIRST_LOGPROBS not in names)
        ):
            return None
        return self._api.DisaggregatedParams(
            request_type="generation_only", **supported(context.arguments(_make_logprob), names)
        )

    def _is_shut_down(self) -> bool:
        executor = getattr(self._llm, "_executor", None)
        return executor is None or bool(executor.is_shutdown())

    async def _warm_up(self) -> None:
        sampling = self._api.SamplingParams(end_id=-1, pad_id=0, max_tokens=1, detokenize=False)
        result = self._llm.generate_async({"prompt_token_ids": [0]}, sampling_params=sampling, streaming=True)
        async for _ in result:
            pass
        await self._read_stats(_STATS_TIMEOUT_S)

    async def _read_stats(self, within_s: float) -> None:
        """Take the statistics of the iterations since the last time; wait for the first ones only where there are none."""
        now = asyncio.get_running_loop().time
        deadline, had_any = now() + within_s, bool(self._stats)
        async for stats in self._llm.get_stats_async(timeout=within_s):
            self._stats = stats
            if now() >= deadline or not had_any:
                return

    def _serving(self) -> Serving:
        """Read the sizes that TensorRT-LLM settled on."""
        spec, ranks = self._spec, self._spec.data_parallel
        tokens, requests = spec.max_batch_tokens, spec.max_running_requests
        cache = self._stats.get("kvCacheStats", {})
        context_length = spec.context_length or int(self._llm.args.max_seq_len)
        blocks = (
            cache.get("maxNumBlocks") or (spec.kv_blocks or -(-context_length // spec.block_size)) // ranks
        )
        if not cache:
            _log.warning(
                "kv_blocks_assumed", blocks=blocks, fix="set kv_blocks; TensorRT-LLM told no statistics"
            )
        return Serving(
            block_size=spec.block_size,
            num_blocks=blocks,
            context_length=context_length,
            vocab_size=spec.vocab_size,
            max_running_requests=requests or _RUNNING_DEFAULT,
            max_batch_tokens=tokens or _CHUNK_DEFAULT,
            ranks=ranks,
            kv_events=self._reuses_blocks,
        )


def _make_logprob(**fields: Any) -> Any:
    return importlib.import_module("tensorrt_llm.executor.result").Logprob(**fields)


def _prefilled(output: Output, params: Any) -> Output:
    """Make the last output of a prompt whose KV a generation request will take; that one has the first token too.

    A prompt whose first token ends the answer has no generation request.
    """
    if output.finish_reason is not None and output.finish_reason.value == "stop":
        return output
    return Output(finish_reason=output.finish_reason, kv_payload=encode(Context.of(params)))
