"""Requests as vLLM's engine core takes them, its outputs as deltas, and the load of each data-parallel rank."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np

from penstock.core.errors import EngineError, Overloaded, PenstockError, RequestError, StepFailed
from penstock.core.ids import RequestId
from penstock.core.types.events import KvEvent
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import (
    MODALITIES,
    Delta,
    ExpandedPrompt,
    FinishReason,
    MediaItem,
    MediaKind,
    MediaPrompt,
    PromptLogprobs,
    Request,
    TokenLogprob,
)
from penstock.core.wire import num_tokens, pack_tokens, token_list
from penstock.engine.vllm.tiers.stats import TierStats

_PREEMPTED = 3
_SEEDS = 1 << 63
_TOKENS_MAX = (1 << 31) - 1
"""More than any context or vocabulary holds. A number above 64 bits cannot be sent to vLLM's core."""
_CONTINUED = 1_000_003
"""Changes the seed of a continuation, which would otherwise reuse the random numbers of the answer's first tokens."""


@dataclass(slots=True)
class VllmRequest:
    """One request in vLLM. `num_tokens` is its context so far, `missing` the prompt tokens to compute before its first output."""

    request: Request
    arrived_s: float
    num_tokens: int
    missing: int
    has_output: bool = False
    rank: int = 0

    @classmethod
    def of(cls, request: Request, arrived_s: float, rank: int = 0) -> "VllmRequest":
        """Begin a request on a data-parallel rank, which has as many of its tokens as the router expected."""
        count = num_tokens(request.token_ids)
        return cls(request, arrived_s, count, max(count - request.expected_cached_tokens, 1), rank=rank)

    def refused(self, why: PenstockError) -> Delta:
        """Make the last delta of a request that vLLM does not take."""
        return Delta(
            request_id=self.request.request_id, finish_reason=FinishReason.ERROR, error=why.to_info()
        )


def sampling_arguments(request: Request, eos_token_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Give the arguments of vLLM's SamplingParams, with end-of-sequence tokens beside those that vLLM knows.

    vLLM takes the tokens that a migrated request has emitted as part of its prompt. So `max_tokens` and `min_tokens`
    shrink by them, frequency and presence penalties do not count them, and a seed starts its random numbers anew: a
    greedy request continues exactly after a migration, others as vLLM would continue that prompt.
    """
    sampling, emitted = request.sampling, request.num_emitted
    max_tokens = min(sampling.max_tokens - emitted, _TOKENS_MAX)
    return {
        "max_tokens": max_tokens,
        "min_tokens": max(min(sampling.min_tokens - emitted, max_tokens), 0),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": min(sampling.top_k or 0, _TOKENS_MAX),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": _seed(request),
        "stop_token_ids": sampling.stops_with(eos_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "detokenize": False,
        "skip_clone": True,
    }


def _seed(request: Request) -> int | None:
    """Return a seed only if the client set one: vLLM samples seeded requests row by row, all others as one batch."""
    seed = request.sampling.seed
    if seed is None or request.sampling.seed_drawn:
        return None
    return (seed + request.choice + _CONTINUED * request.num_emitted) % _SEEDS


def delta_of(running: VllmRequest, output: Any) -> Delta:
    """Make a delta of vLLM's EngineCoreOutput."""
    request_id, reason = running.request.request_id, output.finish_reason
    finish = None if reason is None else _FINISH.get(str(reason), FinishReason.ERROR)
    error = None
    if finish is FinishReason.ERROR:
        error = StepFailed(
            f"request {request_id}: vLLM ended it with {reason}; another worker may serve it"
        ).to_info()
    stats = output.prefill_stats
    return Delta(
        request_id=request_id,
        token_ids=pack_tokens(output.new_token_ids),
        finish_reason=finish,
        cached_tokens=None if running.has_output or stats is None else stats.num_cached_tokens,
        logprobs=_logprobs(output.new_logprobs, running.request.sampling.logprobs),
        error=error,
        prompt_logprobs=()
        if running.request.sampling.prompt_logprobs is None
        else _prompt_logprobs(running.request, output.new_prompt_logprobs_tensors),
    )


_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP}


def _logprobs(lists: Any, number: int | None) -> tuple[TokenLogprob, ...]:
    """Make the logprobs of an output's tokens from rows whose first column is the sampled token.

    Rows may have more alternatives than this request asked for: as many as any request of the batch did.
    """
    if lists is None or number is None:
        return ()
    rows = zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True)
    return tuple(
        TokenLogprob(
            token_id=ids[0],
            logprob=values[0],
            top=tuple(zip(ids[1 : 1 + number], values[1 : 1 + number], strict=True)),
        )
        for ids, values in rows
    )


def _prompt_logprobs(request: Request, tensors: Any) -> tuple[PromptLogprobs, ...]:
    """Make the prompt's logprobs of vLLM's LogprobsTensors, which have a row for each of its tokens but the first."""
    number = request.sampling.prompt_logprobs
    if tensors is None or number is None:
        return ()
    ids, values, ranks = (np.asarray(part) for part in tensors[:3])
    count = min(len(ranks), num_tokens(request.token_ids) - request.num_emitted - 1)
    logprobs = PromptLogprobs(
        start=1,
        token_ids=pack_tokens(ids[:count, : 1 + number].astype(np.int32)),
        logprobs=values[:count, : 1 + number].astype("<f4").tobytes(),
        ranks=pack_tokens(ranks[:count].astype(np.int32)),
    )
    return (logprobs.after(request.sampling.prompt_logprobs_from),) if count else ()


_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class LoadCounts:
    """The requests of a rank, totals since the start, and its core's latest statistics: a report costs no walk over requests."""

    total_blocks: int = 0
    steps: int = 0
    preemptions: int = 0
    prefilled_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    kv_failures: int = 0
    """Prompts that were recomputed, as their KV did not come."""
    scheduled: int = 0
    """Requests in its batch after its latest step."""
    usage: float = 0.0
    """Share of its blocks in use, likewise."""
    cached_blocks: int = 0
    """From its KV events."""
    requests: int = 0
    """Those that have begun and not ended."""
    context_tokens: int = 0
    """Of those with output."""
    missing: int = 0
    """Prompt tokens to compute, of those without."""
    waiting: dict[str, float] = field(default_factory=dict)
    """Those without output: vLLM's id -> arrival, oldest first."""
    tiers: TierStats = field(default_factory=TierStats)

    def begin(self, vllm_id: str, running: VllmRequest) -> None:
        """Add a request that is sent to vLLM."""
        self.requests += 1
        self.missing += running.missing
        self.waiting[vllm_id] = running.arrived_s

    def count(self, running: VllmRequest, output: Any) -> None:
        """Count an output of a request, and note in `running` what it changes."""
        tokens = len(output.new_token_ids)
        self.generated_tokens += tokens
        running.num_tokens += tokens
        if running.has_output:
            self.context_tokens += tokens
        else:
            running.has_output = True
            self.context_tokens += running.num_tokens
            self.missing -= running.missing
            del self.waiting[output.request_id]
        if output.prefill_stats is not None:
            self.prefilled_tokens += output.prefill_stats.num_computed_tokens
            self.prefix_hit_tokens += output.prefill_stats.num_cached_tokens
        if output.events:
            self.preemptions += sum(event.type == _PREEMPTED for event in output.events)

    def end(self, vllm_id: str, running: VllmRequest) -> None:
        """Remove a request that has ended."""
        self.requests -= 1
        if running.has_output:
            self.context_tokens -= running.num_tokens
        else:
            self.missing -= running.missing
            del self.waiting[vllm_id]

    def stepped(self, stats: Any) -> Sequence[KvEvent]:
        """Note a step with vLLM's SchedulerStats, None without; give the KV events of tiers that come with them."""
        self.steps += 1
        if stats is None:
            return ()
        self.scheduled, self.usage = stats.num_running_reqs, stats.kv_cache_usage
        return self.tiers.read(stats.kv_connector_stats)

    def load(self, now_s: float) -> WorkerLoad:
        """Report the load. Requests sent since vLLM's latest step count as waiting.

        Blocks in use are from vLLM's latest step; prompt tokens to compute are what the router expected.
        """
        running = max(self.requests - len(self.waiting), min(self.scheduled, self.requests))
        return WorkerLoad(
            running_requests=running,
            waiting_requests=self.requests - running,
            active_blocks=round(self.usage * self.total_blocks) if self.requests else 0,
            total_blocks=self.total_blocks,
            cached_blocks=self.cached_blocks,
            queued_prefill_tokens=self.missing,
            context_tokens=self.context_tokens,
            steps=self.steps,
            preemptions=self.preemptions,
            prefilled_tokens=self.prefilled_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            generated_tokens=self.generated_tokens,
            oldest_wait_s=now_s - next(iter(self.waiting.values())) if self.waiting else 0.0,
            kv_failures=self.kv_failures,
            kv_tiers=self.tiers.counts,
            onboarded_tokens=self.tiers.hit_tokens,
        )


class RequestTable:
    """Requests by their own ids and by vLLM's. The load counts of a rank change as its requests come and go.

    vLLM's id of a request is never used twice: a request id may come again while vLLM still aborts its first use.
    """

    def __init__(self, limit: int, ranks: int) -> None:
        """Make an empty table for at most `limit` requests on `ranks` data-parallel ranks."""
        self._limit = limit
        self.counts = [LoadCounts() for _ in range(ranks)]
        """Of each rank."""
        self._running: dict[str, VllmRequest] = {}
        self._ids: dict[RequestId, str] = {}
        self._serial = count()

    def __len__(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._running)

    def check(self, request: Request) -> None:
        """Check that a request may be added.

        Raises:
            RequestError: its id is under way.
            Overloaded: as many requests are here as may be.
        """
        if request.request_id in self._ids:
            raise RequestError(f"request_id: {request.request_id!r} is under way already; choose another")
        if len(self._running) >= self._limit:
            raise Overloaded(
                f"{len(self._running)} requests are here, at most {self._limit} may be; try another worker",
                retry_after_s=_RETRY_AFTER_S,
            )

    def next_id(self, request: Request) -> str:
        """Give an id by which vLLM may know a request."""
        return f"{request.request_id}-{next(self._serial)}"

    def add(self, vllm_id: str, request: Request, now_s: float, rank: int) -> None:
        """Add a request that is sent to vLLM, without the bytes of its media."""
        running = VllmRequest.of(msgspec.structs.replace(request, media=None), now_s, rank)
        self._ids[request.request_id] = vllm_id
        self._running[vllm_id] = running
        self.counts[rank].begin(vllm_id, running)

    def get(self, vllm_id: str) -> VllmRequest | None:
        """Return a request; None if it has ended."""
        return self._running.get(vllm_id)

    def vllm_id(self, request_id: RequestId) -> str | None:
        """Return vLLM's id of a request; None if it has ended."""
        return self._ids.get(request_id)

    def remove(self, vllm_id: str) -> VllmRequest:
        """Remove a request that has ended."""
        running = self._running.pop(vllm_id)
        del self._ids[running.request.request_id]
        self.counts[running.rank].end(vllm_id, running)
        return running

    def least_loaded(self) -> int:
        """Choose the rank of a request that no router sent: the one with the fewest requests."""
        return min(range(len(self.counts)), key=lambda rank: self.counts[rank].requests)

    def load(self, now_s: float) -> WorkerLoad:
        """Report the load of all ranks."""
        if len(self.counts) == 1:
            return self.counts[0].load(now_s)
        return WorkerLoad.of_ranks([counts.load(now_s) for counts in self.counts])


class VllmInputs:
    """Makes vLLM's EngineCoreRequest, which vLLM's own InputProcessor checks and completes."""

    def __init__(self, processor: Any, adapters: dict[str, Any]) -> None:
        """Make it.

        Args:
            processor: vLLM's InputProcessor.
            adapters: vLLM's LoRARequest of each adapter.
        """
        self._processor = processor
        self._adapters = adapters

    def make(
        self, vllm_id: str, request: Request, arguments: dict[str, Any], rank: int, prompt: Any = None
    ) -> Any:
        """Make an EngineCoreRequest.

        Args:
            vllm_id: its id in vLLM.
            request: as submitted.
            arguments: of vLLM's SamplingParams.
            rank: the data-parallel rank that computes it.
            prompt: vLLM's input with the request's media; None: the request has none.

        Raises:
            RequestError: vLLM refuses it.
            EngineError: vLLM cannot continue it.
        """
        from vllm import SamplingParams  # noqa: PLC0415 - an optional package of gigabytes
        from vllm.exceptions import VLLMClientError  # noqa: PLC0415
        from vllm.inputs.engine import tokens_input  # noqa: PLC0415
        from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415

        structured = request.sampling.structured
        if structured is not None and request.num_emitted:
            raise EngineError(
                f"request {request.request_id}: its worker was lost after {request.num_emitted} tokens, and vLLM cannot"
                " continue an answer that response_format constrains; send it again"
            )
        if prompt is None:
            prompt = tokens_input(token_list(request.token_ids), cache_salt=request.salt.hex() or None)
        try:
            if structured is not None:
                constraint = msgspec.json.decode(structured, type=dict[str, Any])
                arguments = arguments | {"structured_outputs": StructuredOutputsParams(**constraint)}
            return self._processor.process_inputs(
                vllm_id,
                prompt,
                SamplingParams(**arguments),
                ("generate",),
                lora_request=self._adapters[request.adapter] if request.adapter else None,
                priority=-request.priority,
                data_parallel_rank=rank,
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            param = getattr(error, "parameter", None)
            if param is None and structured is not None:
                param = "response_format"
            raise RequestError(f"vLLM: {' '.join(str(error.args[0]).split())}", param=param) from error


_ITEMS_MAX = 256
"""vLLM's own limit is 999 where the operator sets none (`limit_mm_per_prompt`)."""


class MediaReader:
    """Makes vLLM's inputs of prompts with media.

    vLLM keeps what it has processed by an item's digest. Of its two caches this uses the one without a mirror in the engine core:
    a prompt that is only expanded, or aborted before it is sent, would leave the two different.
    """

    def __init__(self, processor: Any) -> None:
        """Make it; `processor` is vLLM's InputProcessor."""
        self._renderer = processor.renderer
        self._config = processor.model_config
        self.kinds = _kinds(processor) if processor.supports_mm_inputs else ()
        """What the model takes."""

    async def expand(self, prompt: MediaPrompt) -> ExpandedPrompt:
        """Put as many tokens in place of each placeholder as vLLM computes for it.

        Raises:
            RequestError: vLLM refuses an item, or their number.
        """
        inputs = await self._process(prompt)
        place = {name: iter(ranges) for name, ranges in inputs["mm_placeholders"].items()}
        positions = tuple(next(place[item.modality]).offset for item in prompt.items)
        return ExpandedPrompt(token_ids=pack_tokens(inputs["prompt_token_ids"]), positions=positions)

    async def prompt(self, request: Request) -> Any:
        """Make vLLM's MultiModalInput of a request that has media.

        Raises:
            RequestError: vLLM refuses an item.
            EngineError: this vLLM expands the prompt to other tokens than the one that did it for the frontend.
        """
        from vllm.inputs.engine import mm_input  # noqa: PLC0415 - an optional package of gigabytes

        assert request.media is not None, "it has media"
        inputs = await self._process(request.media)
        token_ids, expanded = token_list(request.token_ids), inputs["prompt_token_ids"]
        if token_ids[: len(expanded)] != expanded:
            raise EngineError(
                f"request {request.request_id}: its media take {len(expanded)} prompt tokens here, others than at the worker"
                " that expanded them; start all workers of a model with the same engine_args"
            )
        return mm_input(
            token_ids,
            inputs["mm_kwargs"],
            inputs["mm_hashes"],
            inputs["mm_placeholders"],
            cache_salt=request.salt.hex() or None,
        )

    async def _process(self, prompt: MediaPrompt) -> Any:
        """Decode and process the media of a prompt.

        Raises:
            RequestError: an item cannot be read, or vLLM refuses it. Decoders and processors raise anything.
            EngineError: this host lacks something for it, as memory.
        """
        data: dict[str, list[Any]] = defaultdict(list)
        names: dict[str, list[str]] = defaultdict(list)
        for number, item in enumerate(prompt.items):
            self._check(item, number)
            try:
                data[item.modality].append(await asyncio.to_thread(self._decode, item))
            except BaseException as error:
                raise _refusal(f"{item.modality} {number} of the request cannot be read", error) from error
            names[item.modality].append(item.digest.hex())
        try:
            return await self._renderer._process_multimodal_async(
                token_list(prompt.token_ids), dict(data), dict(names), None, skip_mm_cache=True
            )
        except BaseException as error:
            raise _refusal("vLLM refuses the media of the request", error) from error

    def _check(self, item: MediaItem, number: int) -> None:
        if all(kind.modality != item.modality for kind in self.kinds):
            raise RequestError(
                f"{item.modality} {number} of the request: the model takes no {item.modality}",
                param="messages",
            )

    def _decode(self, item: MediaItem) -> Any:
        """Decode a file as vLLM's server does, with the operator's `media_io_kwargs`."""
        from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO  # noqa: PLC0415 - as above

        options = {
            name: dict(value)
            for name, value in (self._config.multimodal_config.media_io_kwargs or {}).items()
        }
        if item.modality == "audio":
            return AudioMediaIO(**options.get("audio", {})).load_bytes(item.data)
        images = ImageMediaIO(**({"image_mode": "RGB"} | options.get("image", {})))
        if item.modality == "image":
            return images.load_bytes(item.data)
        return VideoMediaIO(images, **options.get("video", {})).load_bytes(item.data)


def _kinds(processor: Any) -> tuple[MediaKind, ...]:
    """Ask the model's class what it takes, with the operator's `limit_mm_per_prompt`."""
    from vllm.model_executor.model_loader.utils import get_model_cls  # noqa: PLC0415 - an optional package of gigabytes

    limits = processor.renderer.get_mm_processor().info.allowed_mm_limits
    model = get_model_cls(processor.model_config)
    kinds = []
    for modality in MODALITIES:
        most = limits.get(modality, 0)
        if most:
            placeholder = model.get_placeholder_str(modality, 1) or ""
            kinds.append(
                MediaKind(modality=modality, placeholder=placeholder, items_max=min(most, _ITEMS_MAX))
            )
    return tuple(kinds)


def _refusal(what: str, error: BaseException) -> PenstockError:
    """Make an error of the request of one about media; a panic of Rust code, or SystemExit, would end more than this request.

    Raises:
        BaseException: `error`, where it is about this task.
    """
    task = asyncio.current_task()
    is_cancelled = isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)
    if is_cancelled or isinstance(error, GeneratorExit | KeyboardInterrupt):
        raise error
    said = " ".join(str(error).split())[:300]
    text = f"{what}: {said if ' ' in said else repr(error)}"
    is_of_host = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)
    if is_of_host or not isinstance(error, Exception):
        return EngineError(text)
    return RequestError(text, param="messages")
