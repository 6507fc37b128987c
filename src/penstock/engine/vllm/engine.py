"""vLLM's engine core behind `seams.Engine`: one `Step` per message of the core.

The core and its device processes are children of the worker. vLLM is imported when the engine starts.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec

from penstock.core.errors import (
    ConfigError,
    EngineError,
    PenstockError,
    RequestError,
    StepFailed,
    Unavailable,
)
from penstock.core.ids import RequestId
from penstock.core.log import cause, get_logger
from penstock.core.types.events import KvEvent
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, ExpandedPrompt, FinishReason, KvHandle, MediaPrompt, Request
from penstock.core.wire import NO_TOKENS
from penstock.engine.child_output import ChildOutput
from penstock.engine.launch import ThisHost
from penstock.engine.scheduling.sequences import checked_tokens
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.arguments import installed_version, lease_s, tokens_per_block, transfer_config
from penstock.engine.vllm.events import VllmKvEvents
from penstock.engine.vllm.launch import end, engine_launch, launch, load_adapters, why_it_died
from penstock.engine.vllm.requests import (
    MediaReader,
    RequestTable,
    VllmInputs,
    VllmRequest,
    delta_of,
    sampling_arguments,
)
from penstock.engine.vllm.tiers.settings import check_tiers
from penstock.engine.vllm.tiers.wakes import IdleWakes

_DROPS_WEIGHTS = 2


def check_sleep(spec: EngineSpec, model_config: Any, level: int) -> None:
    """Check that vLLM can sleep at a level, and wake again.

    Args:
        spec: the engine.
        model_config: vLLM's.
        level: 1 or 2.

    Raises:
        RequestError: it cannot (409).
    """
    if spec.device.startswith("cpu"):
        raise _refusal("vLLM does not support sleep mode on CPUs; stop the worker to free its memory")
    if not model_config.enable_sleep_mode:
        raise _refusal("it was started without sleep mode; set engine_args enable_sleep_mode: true")
    if level == _DROPS_WEIGHTS and spec.adapters:
        raise _refusal("vLLM does not read LoRA adapters again after level 2; use level 1")


async def wake_up(core: Any, level: int) -> None:
    """Have vLLM take its memory again. After level 2 the weights are read from the checkpoint before there is a KV cache.

    Args:
        core: vLLM's AsyncMPClient.
        level: at which it sleeps.
    """
    if level == _DROPS_WEIGHTS:
        await core.wake_up_async(["weights"])
        await core.collective_rpc_async("reload_weights")
        await core.wake_up_async(["kv_cache"])
    else:
        await core.wake_up_async()


def _refusal(why: str) -> RequestError:
    return RequestError(f"engine vllm cannot sleep: {why}", http_status=409)


_TIERS_S = 60.0
"""An idle vLLM tells what its tiers keep with its first steps: milliseconds after its start."""
_UNENCODABLE = (OverflowError, TypeError, ValueError)
_log = get_logger()


class VllmEngine:
    """Implements `Engine`, `MediaReading` and `Sleeping` with vLLM. Not thread-safe: call everything on one event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        """Make an engine; `start` loads vLLM and the model.

        Raises:
            ConfigError: vLLM cannot have the KV tiers.
        """
        if spec.kv.present():
            check_tiers(spec)
        self._spec = spec
        self._host = ThisHost()
        self._output = ChildOutput("vllm")
        self._core: Any = None
        """vLLM's AsyncMPClient."""
        self._inputs: VllmInputs | None = None
        self._media: MediaReader | None = None
        limit = spec.scheduler.max_waiting_requests + spec.scheduler.max_running_requests
        self._requests = RequestTable(limit, spec.data_parallel)
        self._sending: set[asyncio.Task[None]] = set()
        self._unsent: list[Delta] = []
        self._wake = asyncio.Event()
        self._events = VllmKvEvents(spec)
        self._wakes = IdleWakes(lambda: len(self._requests) > 0)
        self._level = 0
        """Level of the current sleep, or of the last one."""
        self._closed = False

    async def start(self) -> EngineInfo:
        """Start vLLM's processes and load the model; with KV tiers, until vLLM's scheduler knows what they keep.

        Raises:
            ConfigError: vLLM cannot run here, or refuses the model or an argument.
            EngineError: a process of vLLM died.
        """
        described = await asyncio.to_thread(engine_launch, self._spec, self._host)
        self._core, processor = await asyncio.to_thread(launch, self._spec, self._output, described)
        self._inputs = VllmInputs(processor, await load_adapters(self._spec, self._core))
        self._media = await asyncio.to_thread(MediaReader, processor)
        self._output.forget()
        config = self._core.vllm_config
        ranks = self._requests.counts
        total_blocks = config.cache_config.num_gpu_blocks // len(ranks)  # vLLM counts those of all ranks
        for counts in ranks:
            counts.total_blocks = total_blocks
        tiers = ranks[0].tiers
        if self._spec.kv.present():
            await self._hear_of_tiers()
            self._events.holders = frozenset(holder.kind for holder in tiers.holders)
            self._wakes.begin(self._core, is_shared=bool(tiers.holders))
        return EngineInfo(
            block_size=tokens_per_block(config),
            total_blocks=total_blocks,
            context_length=config.model_config.max_model_len,
            max_batch_tokens=config.scheduler_config.max_num_batched_tokens,
            max_running_requests=config.scheduler_config.max_num_seqs,
            data_parallel=len(ranks),
            structured_outputs=True,
            sampling_fields=("logit_bias", "allowed_token_ids", "prompt_logprobs"),
            media=self._media.kinds,
            lower_tier_blocks=tiers.own_blocks,
            kv_holders=tiers.holders,
        )

    def submit(self, request: Request) -> None:
        """Send a request to vLLM.

        Raises:
            RequestError: vLLM refuses it, or its id is under way.
            Overloaded: as many requests wait as may.
            Unavailable: the engine is closed.
        """
        if self._closed:
            raise Unavailable("the engine is closed; try another worker")
        self._requests.check(request)
        checked_tokens(request, self._core.vllm_config.model_config.get_vocab_size())
        vllm_id = self._requests.next_id(request)
        rank = self._requests.least_loaded() if request.rank is None else request.rank
        assert self._inputs is not None, "started"
        arguments = self._sampling_arguments(request)
        if request.media is None:
            sending = self._core.add_request_async(self._inputs.make(vllm_id, request, arguments, rank))
        else:
            sending = self._add_with_media(vllm_id, request, arguments, rank)
        self._requests.add(vllm_id, request, asyncio.get_running_loop().time(), rank)
        self._send(sending, vllm_id)

    def abort(self, request_id: RequestId) -> None:
        vllm_id = self._requests.vllm_id(request_id)
        if vllm_id is not None:
            self._requests.remove(vllm_id)
            if self._core is not None:
                self._send(self._core.abort_requests_async([vllm_id]))

    async def expand_media(self, prompt: MediaPrompt) -> ExpandedPrompt:
        """Expand the media of a prompt; see `MediaReader.expand`."""
        assert self._media is not None, "started"
        return await self._media.expand(prompt)

    async def steps(self) -> AsyncIterator[Step]:
        """Yield a step for each message of vLLM's engine core, until `close`.

        Raises:
            EngineError: a process of vLLM died.
        """
        getting: asyncio.Task[Any] | None = None
        if self._core is None:
            return
        try:
            while True:
                if getting is None:
                    getting = asyncio.get_running_loop().create_task(self._message())
                    getting.add_done_callback(lambda _: self._wake.set())
                await self._wake.wait()
                self._wake.clear()
                if self._closed:
                    return
                if getting.done():
                    ended, getting = getting, None
                    for step in self._steps(self._deltas(ended.result())):
                        yield step
                elif (events := self._events.take()) or self._unsent:
                    deltas, self._unsent = tuple(self._unsent), []
                    for step in self._steps(deltas, events):
                        yield step
        finally:
            if getting is not None:
                getting.cancel()
                await asyncio.gather(getting, return_exceptions=True)

    def load(self) -> WorkerLoad:
        return self._requests.load(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """End vLLM's processes. Safe after a failed `start`, and twice."""
        self._closed = True
        self._wake.set()
        await self._wakes.end()
        core, self._core = self._core, None
        if core is not None:
            await asyncio.to_thread(end, core)
        await asyncio.to_thread(self._host.close)

    def check_sleep(self, level: int) -> None:
        """Check that vLLM was started with sleep mode, and can read again what the level drops.

        Raises:
            RequestError: it was not, or cannot (409).
        """
        check_sleep(self._spec, self._core.vllm_config.model_config, level)

    async def sleep(self, level: int) -> None:
        await self._wakes.end()
        await self._core.sleep_async(level)
        self._level = level

    async def wake_up(self) -> None:
        await wake_up(self._core, self._level)
        self._wakes.begin(self._core, is_shared=bool(self._events.holders))

    # -- where NixlVllmEngine differs

    def _sampling_arguments(self, request: Request) -> dict[str, Any]:
        """Give the arguments of vLLM's SamplingParams."""
        return sampling_arguments(request, self._spec.eos_token_ids)

    def _delta(self, running: VllmRequest, output: Any) -> Delta:
        """Make a delta of vLLM's EngineCoreOutput, before it is counted."""
        return delta_of(running, output)

    # -- messages

    async def _hear_of_tiers(self) -> None:
        """Take vLLM's first messages until each rank's scheduler has told of its tiers; it computes prompts that come sooner."""
        try:
            async with asyncio.timeout(_TIERS_S):
                while not all(counts.tiers.counts for counts in self._requests.counts):
                    self._deltas(await self._message())
        except TimeoutError:
            _log.warning(
                "kv_tiers_unknown",
                waited_s=_TIERS_S,
                effect="first prompts may be computed instead of loaded",
            )
        self._wake.set()  # `steps` gives the events that came

    def _deltas(self, outputs: Any) -> tuple[Delta, ...]:
        """Count what one data-parallel rank's step brought, and make its deltas."""
        deltas, counts = [], self._requests.counts[outputs.engine_index]
        for output in outputs.outputs:
            running = self._requests.get(output.request_id)
            if running is None:
                continue  # aborted meanwhile
            deltas.append(self._delta(running, output))
            counts.count(running, output)
            if output.finish_reason is not None:
                self._requests.remove(output.request_id)
        self._count_step(outputs.engine_index, outputs.scheduler_stats)
        return tuple(deltas)

    def _count_step(self, rank: int, stats: Any) -> None:
        """Note a rank's step with vLLM's SchedulerStats, None without, and the KV events that come with them."""
        counts = self._requests.counts[rank]
        self._events.add(rank, counts.stepped(stats))
        if stats is not None and stats.kv_connector_stats:
            self._events.read(rank, stats.kv_connector_stats)
            counts.cached_blocks = min(self._events.readers[rank].num_blocks, counts.total_blocks)

    def _steps(
        self, deltas: tuple[Delta, ...], events: Sequence[tuple[int, Sequence[KvEvent]]] | None = None
    ) -> Iterator[Step]:
        """Make a step for each rank with events; the deltas are in the last one. `events`: None takes those that are here."""
        *first, (rank, last) = (self._events.take() if events is None else events) or ((0, ()),)
        for other, own in first:
            yield Step(events=tuple(own), rank=other, load=self.load())
        yield Step(deltas=deltas, events=tuple(last), rank=rank, load=self.load())

    async def _message(self) -> Any:
        """Wait for the next message of vLLM's engine core.

        Raises:
            EngineError: a process of vLLM died.
        """
        try:
            return await self._core.get_output_async()
        except Exception as error:
            raise EngineError(f"vLLM died: {why_it_died(self._core, self._output, error)}") from error

    async def _add_with_media(
        self, vllm_id: str, request: Request, arguments: dict[str, Any], rank: int
    ) -> None:
        """Process a request's media, then send it, unless it was aborted meanwhile."""
        assert self._inputs is not None, "started"
        assert self._media is not None, "started"
        prompt = await self._media.prompt(request)
        if self._requests.get(vllm_id) is not None and self._core is not None:
            await self._core.add_request_async(self._inputs.make(vllm_id, request, arguments, rank, prompt))

    def _send(self, sending: Coroutine[Any, Any, None], vllm_id: str | None = None) -> None:
        """Send a message after those before it; `vllm_id`: of the request that it starts, None if it starts none."""
        task = asyncio.get_running_loop().create_task(sending)
        self._sending.add(task)
        task.add_done_callback(partial(self._sent, vllm_id))

    def _sent(self, vllm_id: str | None, task: asyncio.Task[None]) -> None:
        """End a request that was not sent, whatever the reason. `steps` reports an engine that died."""
        self._sending.discard(task)
        error = asyncio.CancelledError("cancelled") if task.cancelled() else task.exception()
        if error is None or vllm_id is None or self._requests.get(vllm_id) is None:
            return
        if isinstance(error, _UNENCODABLE):
            error = RequestError(f"vLLM's engine core cannot be sent this request: {error}")
        elif not isinstance(error, PenstockError):
            _log.error("request_not_sent", request_id=vllm_id, **cause(error))
            error = StepFailed(f"vLLM's engine core was not sent this request: {error!r}")
        self._unsent.append(self._requests.remove(vllm_id).refused(error))
        self._wake.set()


_PAYLOAD_VERSION = 1
_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False,
    "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


class _Params(msgspec.Struct):
    """The fields of vLLM's `kv_transfer_params` that Penstock checks."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[list[int]]
    remote_num_tokens: int
    tp_size: int


class _Payload(msgspec.Struct, array_like=True):
    version: int
    params: dict[str, Any]


def pack_params(params: Mapping[str, Any]) -> bytes:
    """Make a handle's payload of the `kv_transfer_params` with which vLLM ends a prefill."""
    return msgspec.msgpack.encode(_Payload(_PAYLOAD_VERSION, dict(params)))


def unpack_params(payload: bytes) -> dict[str, Any]:
    """Give the `kv_transfer_params` of a decode request.

    Raises:
        ValueError: this is no payload of `pack_params`.
    """
    unpacked = msgspec.msgpack.decode(payload, type=_Payload)
    if unpacked.version != _PAYLOAD_VERSION:
        raise ValueError(f"version {unpacked.version}, expected {_PAYLOAD_VERSION}")
    msgspec.convert(unpacked.params, _Params)
    return unpacked.params | {"do_remote_prefill": True, "do_remote_decode": False}


class NixlVllmEngine(VllmEngine):
    """Implements `NativeKvTransfer` besides `Engine`: a prefill's KV is read by the decode worker's vLLM."""

    def __init__(self, spec: EngineSpec) -> None:
        """Make an engine.

        Raises:
            ConfigError: NIXL is not installed, or the graph's `kv_transfer_config` does not use it.
        """
        if find_spec("nixl") is None:
            wheels = "--no-deps nixl nixl-cu12" if spec.device.startswith("cpu") else "nixl"
            raise ConfigError(
                f"engine vllm: roles prefill and decode transfer KV by NIXL, which is not installed; run `pip install {wheels}`"
            )
        super().__init__(spec)
        self._ttl_s = lease_s(transfer_config(spec))
        self._has_warned = False

    def kv_transfer_kind(self) -> str:
        """Name the transfer by vLLM's version, which must be equal, and by the device, since CPUs and GPUs lay out KV differently."""
        return f"vllm-{installed_version()[1]}-nixl-{_PAYLOAD_VERSION}-{self._spec.device.partition(':')[0]}"

    def check_sleep(self, level: int) -> None:  # noqa: ARG002 - at none
        raise RequestError(
            "engine vllm cannot sleep: NIXL has registered its KV memory, for roles prefill and decode; stop the worker to"
            " free its memory",
            http_status=409,
        )

    def _sampling_arguments(self, request: Request) -> dict[str, Any]:
        params = self._transfer_params(request)
        extra = {} if params is None else {"extra_args": {"kv_transfer_params": params}}
        return super()._sampling_arguments(request) | extra

    def _delta(self, running: VllmRequest, output: Any) -> Delta:
        delta = super()._delta(running, output)
        request, stats, params = running.request, output.prefill_stats, output.kv_transfer_params
        if request.kv is not None and stats is not None and not running.has_output:
            counts = self._requests.counts[running.rank]
            counts.prefix_hit_tokens -= stats.num_external_cached_tokens
            counts.kv_failures += stats.num_computed_tokens > 1
        if request.prefill_only and params and delta.finish_reason is FinishReason.LENGTH:
            handle = KvHandle.native(pack_params(params), params["remote_num_tokens"], self._ttl_s)
            return msgspec.structs.replace(delta, token_ids=NO_TOKENS, logprobs=(), kv=handle)
        return delta

    def _transfer_params(self, request: Request) -> dict[str, Any] | None:
        if request.prefill_only:
            return dict(_PREFILL)
        if request.kv is None:
            return None
        try:
            return unpack_params(request.kv.payload)
        except (ValueError, msgspec.MsgspecError) as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "kv_handle_unreadable",
                    request_id=request.request_id,
                    reason=str(error),
                    then="recomputed",
                )
            return None
