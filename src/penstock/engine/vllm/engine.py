"""vLLM's engine core behind `seams.Engine`: one `Step` per message of the core.

The core and its device processes are children of the worker. vLLM is imported when the engine starts.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Mapping
from itertools import count
from typing import Any

import msgspec
import pydantic

from penstock.core.errors import ConfigError, EngineError, Overloaded, RequestError, Unavailable
from penstock.core.ids import RequestId
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, Request
from penstock.core.types.steps import Step
from penstock.core.wire import token_list
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.adapters import lora_paths
from penstock.engine.vllm.arguments import check_platform, engine_arguments, environment
from penstock.engine.vllm.child_output import ChildOutput
from penstock.engine.vllm.connector_counts import ConnectorCounts
from penstock.engine.vllm.kv_events import VllmKvEvents
from penstock.engine.vllm.load import LoadCounts
from penstock.engine.vllm.ranks import RankChoice
from penstock.engine.vllm.requests import Running, check_tokens, delta_of, sampling_arguments

_CLOSE_S = 10.0
_RETRY_AFTER_S = 1.0


class VllmEngine:
    """Implements `Engine` with vLLM. Not thread-safe: call everything on one event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        """Make an engine; `start` loads vLLM and the model."""
        self._spec = spec
        self._output = ChildOutput()
        self._core: Any = None
        """vLLM's AsyncMPClient."""
        self._inputs: Any = None
        """vLLM's InputProcessor, which checks requests and knows the end tokens."""
        self._adapters: dict[str, Any] = {}
        """vLLM's LoRARequest of each adapter."""
        self._running: dict[str, Running] = {}
        """By vLLM's id: an id of Penstock's may come again while vLLM still ends its first use."""
        self._ids: dict[RequestId, str] = {}
        self._serial = count()
        self._sending: set[asyncio.Task[None]] = set()
        self._counts = LoadCounts()
        self.connectors = ConnectorCounts()
        """What vLLM's KV connectors count."""
        self._wake = asyncio.Event()
        self._events = VllmKvEvents(spec, self._events_came)
        self._ranks = RankChoice(self._events.blocks, spec.block_size)
        self._closed = False

    async def start(self) -> EngineInfo:
        """Start vLLM's processes and load the model.

        Raises:
            ConfigError: vLLM cannot run here, or refuses the model or an argument.
        """
        await asyncio.to_thread(self._launch)
        await self._load_adapters()
        self._output.forget()
        self._events.follow()
        config = self._core.vllm_config
        self._counts.block_size = config.cache_config.block_size
        ranks = self._spec.data_parallel
        self._counts.num_ranks = ranks
        self._counts.total_blocks = config.cache_config.num_gpu_blocks  # of all ranks
        return EngineInfo(
            block_size=config.cache_config.block_size,
            total_blocks=self._counts.total_blocks,
            context_length=config.model_config.max_model_len,
            max_batch_tokens=config.scheduler_config.max_num_batched_tokens,
            max_running_requests=ranks * config.scheduler_config.max_num_seqs,
            prompts_at_once=ranks,
            structured_outputs=True,
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
        if request.request_id in self._ids:
            raise RequestError(f"request_id: {request.request_id!r} is under way already; choose another")
        limit = self._spec.scheduler.max_waiting_requests + self._spec.scheduler.max_running_requests
        if len(self._running) >= limit:
            raise Overloaded(
                f"{len(self._running)} requests are here, at most {limit} may be; try another worker",
                retry_after_s=_RETRY_AFTER_S,
            )
        check_tokens(request, self._core.vllm_config.model_config.get_vocab_size())
        vllm_id = f"{request.request_id}-{next(self._serial)}"
        rank, cached = self._ranks.choose(request, self._running.values())
        core_request = self._core_request(vllm_id, request, rank)
        self._ids[request.request_id] = vllm_id
        self._running[vllm_id] = Running.of(request, asyncio.get_running_loop().time(), rank, cached)
        self._send(self._core.add_request_async(core_request))

    def abort(self, request_id: RequestId) -> None:
        vllm_id = self._ids.pop(request_id, None)
        if vllm_id is not None:
            del self._running[vllm_id]
        if vllm_id is not None and self._core is not None:
            self._send(self._core.abort_requests_async([vllm_id]))

    async def steps(self) -> AsyncIterator[Step]:
        """Yield a step for each message of vLLM's engine core, and for KV events that come without one, until `close`.

        Raises:
            EngineError: a process of vLLM died.
        """
        getting: asyncio.Task[Any] | None = None
        if self._core is None:
            return
        try:
            while True:
                if getting is None:
                    getting = asyncio.get_running_loop().create_task(self._core.get_output_async())
                    getting.add_done_callback(lambda _: self._wake.set())
                await self._wake.wait()
                self._wake.clear()
                if self._closed:
                    return
                if getting.done():
                    ended, getting = getting, None
                    yield self._step(self._outputs(ended))
                elif events := self._events.take():
                    yield Step(events=events, load=self.load())
        finally:
            if getting is not None:
                getting.cancel()
                await asyncio.gather(getting, return_exceptions=True)

    def load(self) -> WorkerLoad:
        return self._counts.load(self._running.values(), asyncio.get_running_loop().time())

    async def close(self) -> None:
        """End vLLM's processes. Safe after a failed `start`, and twice."""
        self._closed = True
        self._wake.set()
        await self._events.close()
        core, self._core = self._core, None
        if core is not None:
            self.connectors.log()
            await asyncio.to_thread(_end, core)

    # -- where NixlVllmEngine differs

    def _environment(self, present: Mapping[str, str]) -> dict[str, str]:
        """Give the variables to set for vLLM's processes."""
        return environment(self._spec, present)

    def _sampling_arguments(self, request: Request) -> dict[str, Any]:
        """Give the arguments of vLLM's SamplingParams."""
        return sampling_arguments(request)

    def _delta(self, running: Running, output: Any) -> Delta:
        """Make a delta of vLLM's EngineCoreOutput, before it is counted."""
        return delta_of(running, output)

    # -- starting

    def _launch(self) -> None:
        """Start vLLM; blocks until it is ready.

        Raises:
            ConfigError: as for `start`.
        """
        os.environ.update(self._environment(os.environ))
        with self._output.taken():
            try:
                self._launch_core()
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"engine vllm: {self._why(error)}") from error

    def _launch_core(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - an optional package of gigabytes
        from vllm.platforms import current_platform  # noqa: PLC0415
        from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
        from vllm.v1.engine.core_client import EngineCoreClient  # noqa: PLC0415
        from vllm.v1.engine.input_processor import InputProcessor  # noqa: PLC0415
        from vllm.v1.executor import Executor  # noqa: PLC0415

        check_platform(self._spec.device, current_platform.device_type)
        arguments = AsyncEngineArgs(
            **engine_arguments(self._spec, AsyncEngineArgs), **self._events.arguments()
        )
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)  # its batch limits
        self._output.take_log("vllm")  # creating the configuration sets it up
        self._inputs = InputProcessor(config)
        self._core = EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=True)

    def _why(self, error: Exception) -> str:
        """Say in one line why vLLM did not start: the first error, which may be another process's."""
        if isinstance(error, pydantic.ValidationError):
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            text = f"engine_args: {name}: {first['msg']}, got {first['input']!r}" if name else first["msg"]
        else:
            text = str(error) or type(error).__name__
        if "root cause" in text:
            text = self._output.reason() or f"a process ended without an error text ({text})"
        text = " ".join(text.removeprefix("Value error, ").split())
        return f"{self._spec.model}: {text}; --log-level debug shows all that vLLM printed"

    async def _load_adapters(self) -> None:
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        for number, (name, path) in enumerate(lora_paths(self._spec).items(), start=1):
            adapter = self._adapters[name] = LoRARequest(name, number, str(path))
            try:
                await self._core.add_lora_async(adapter)
            except Exception as error:
                raise ConfigError(f"adapters: {name}: {' '.join(str(error).split())}") from error

    # -- requests

    def _core_request(self, vllm_id: str, request: Request, rank: int) -> Any:
        """Make vLLM's EngineCoreRequest."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.exceptions import VLLMClientError  # noqa: PLC0415
        from vllm.inputs.engine import tokens_input  # noqa: PLC0415
        from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415

        if request.sampling.structured is not None and request.num_emitted:
            raise EngineError(
                f"request {request.request_id}: its worker was lost after {request.num_emitted} tokens, and vLLM cannot"
                " continue an answer that response_format constrains; send it again"
            )
        arguments = self._sampling_arguments(request)
        adapter = self._adapters[request.adapter] if request.adapter else None
        prompt = tokens_input(token_list(request.token_ids), cache_salt=request.salt.hex() or None)
        try:
            if request.sampling.structured is not None:
                arguments["structured_outputs"] = StructuredOutputsParams(
                    **msgspec.json.decode(request.sampling.structured, type=dict[str, Any])
                )
            return self._inputs.process_inputs(
                vllm_id,
                prompt,
                SamplingParams(**arguments),
                ("generate",),
                lora_request=adapter,
                priority=-request.priority,
                data_parallel_rank=rank,
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            param = getattr(error, "parameter", None)
            if param is None and request.sampling.structured is not None:
                param = "response_format"
            raise RequestError(f"vLLM: {' '.join(str(error.args[0]).split())}", param=param) from error

    def _step(self, outputs: Any) -> Step:
        deltas = []
        for output in outputs.outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue  # aborted meanwhile
            deltas.append(self._delta(running, output))
            self._counts.count(running, output)
            if output.finish_reason is not None:
                del self._running[output.request_id]
                if self._ids.get(running.request.request_id) == output.request_id:
                    del self._ids[running.request.request_id]
        stats = outputs.scheduler_stats
        self._counts.stepped(stats, outputs.engine_index)
        if stats is not None:
            self.connectors.count(stats.kv_connector_stats, asyncio.get_running_loop().time())
        return Step(deltas=tuple(deltas), events=self._events.take(), load=self.load())

    def _events_came(self) -> None:
        self._counts.cached_blocks = min(self._events.num_blocks, self._counts.total_blocks)
        self._wake.set()

    def _outputs(self, ended: asyncio.Task[Any]) -> Any:
        """Give the message of vLLM's engine core that came.

        Raises:
            EngineError: a process of vLLM died.
        """
        try:
            return ended.result()
        except Exception as error:
            raise EngineError(f"vLLM died: {self._output.reason() or error}") from error

    def _send(self, sending: Coroutine[Any, Any, None]) -> None:
        """Send a message in its turn; where the engine is dead, `steps` says so."""
        task = asyncio.get_running_loop().create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled():
            task.exception()


def _end(core: Any) -> None:
    """End vLLM's processes and wait for them; those that take too long are killed."""
    manager = core.resources.engine_manager
    core.shutdown(timeout=_CLOSE_S)
    for process in () if manager is None else manager.processes:
        process.join(_CLOSE_S)
