"""Starts and ends vLLM's engine core and its device processes, on the node that leads and on followers. They are children of the worker."""

import dataclasses
import os
import signal
from collections.abc import Callable
from typing import Any

import pydantic

from penstock.core.errors import ConfigError, EngineError
from penstock.engine.child_output import ChildOutput
from penstock.engine.launch import EngineLaunch, LaunchHost
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.arguments import (
    VERSIONS,
    check_platform,
    engine_arguments,
    environment,
    lora_paths,
    transfer_config,
    transfer_environment,
    transfers_kv,
    typed_arguments,
)
from penstock.engine.vllm.events import events_arguments
from penstock.engine.vllm.tiers.settings import HASH_KEY, check_tiers, with_tiers

_CLOSE_S = 10.0
_OTHER_BUILD = "torchvision::nms"
_OTHER_BUILD_FIX = "pip uninstall -y torchvision torchaudio torchcodec triton"
_SCHEDULER = "penstock.engine.vllm.scheduler.Telling{}Scheduler"


def engine_launch(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:
    """Describe the start of vLLM's engine core.

    Raises:
        ConfigError: vLLM cannot have a setting, the graph sets an argument of Penstock's, or the host lacks what it needs.
    """
    variables = environment(spec, host)
    if transfers_kv(spec):
        variables |= transfer_environment(spec, host)
        spec = dataclasses.replace(spec, args={**spec.args, "kv_transfer_config": transfer_config(spec)})
    if spec.kv.present():
        check_tiers(spec)
        spec = with_tiers(spec, host)
        variables[HASH_KEY] = host.read("the deployment's hash key", spec.hash_key.hex)
    return EngineLaunch(
        call="vllm.AsyncEngineArgs",
        version=f"vLLM {VERSIONS}",
        arguments=engine_arguments(spec) | events_arguments(spec),
        environment=variables,
    )


def launch(spec: EngineSpec, output: ChildOutput, described: EngineLaunch) -> tuple[Any, Any]:
    """Start vLLM's processes and load the model; blocks until they are ready.

    Args:
        spec: the engine.
        output: takes what they print.
        described: the arguments, and the variables that they inherit.

    Returns:
        vLLM's AsyncMPClient, which speaks to the engine core, and its InputProcessor.

    Raises:
        ConfigError: vLLM cannot run here, or refuses the model or an argument.
    """
    os.environ.update(described.environment)
    with output.taken():
        try:
            return _launch(spec, output, described)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"engine vllm: {spec.model}: {why_it_does_not_start(error, output)}") from error


async def load_adapters(spec: EngineSpec, core: Any) -> dict[str, Any]:
    """Load the worker's adapters; give vLLM's LoRARequest of each by its name.

    Raises:
        ConfigError: vLLM refuses one.
    """
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - an optional package of gigabytes

    adapters = {}
    for number, (name, path) in enumerate(lora_paths(spec).items(), start=1):
        adapters[name] = LoRARequest(name, number, str(path))
        try:
            await core.add_lora_async(adapters[name])
        except Exception as error:
            raise ConfigError(f"adapters: {name}: {' '.join(str(error).split())}") from error
    return adapters


def end(core: Any) -> None:
    """End vLLM's processes and wait for their end; a process that takes too long is killed."""
    manager = core.resources.engine_manager
    core.shutdown(timeout=_CLOSE_S)
    for process in () if manager is None else manager.processes:
        process.join(_CLOSE_S)


def why_it_died(core: Any, output: ChildOutput, error: Exception) -> str:
    """Say in one line why a vLLM that ran is dead: the last error that its processes printed, else the exit of one process."""
    if reason := output.reason():
        return reason
    manager = core.resources.engine_manager
    for process in () if manager is None else manager.processes:
        if code := process.exitcode:
            how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
            return f"its engine core has ended: {how}"
    text = " ".join(str(error).split())
    return "one of its processes ended without an error text" if "root cause" in text else text


def tell_events(config: Any) -> None:
    """Set the scheduler that tells KV events in a VllmConfig, which has decided whether scheduling is asynchronous."""
    if config.kv_events_config is not None:
        kind = "Async" if config.scheduler_config.async_scheduling else ""
        config.scheduler_config.scheduler_cls = _SCHEDULER.format(kind)


def _launch(spec: EngineSpec, output: ChildOutput, described: EngineLaunch) -> tuple[Any, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - an optional package of gigabytes
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
    from vllm.v1.engine.core_client import EngineCoreClient  # noqa: PLC0415
    from vllm.v1.engine.input_processor import InputProcessor  # noqa: PLC0415
    from vllm.v1.executor import Executor  # noqa: PLC0415

    check_platform(spec.device, current_platform.device_type)
    arguments = AsyncEngineArgs(**typed_arguments(spec, described.arguments, AsyncEngineArgs))
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)  # its batch limits
    tell_events(config)
    output.take_log("vllm")  # creating the configuration sets it up
    inputs = InputProcessor(config)
    return EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=True), inputs


def why_it_does_not_start(error: Exception, output: ChildOutput) -> str:
    """Say in one line why vLLM did not start: the first error, which may be another process's."""
    if isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        text = f"engine_args: {name}: {first['msg']}, got {first['input']!r}" if name else first["msg"]
    else:
        text = str(error) or type(error).__name__
    if "root cause" in text:
        text = output.reason() or f"a process ended without an error text ({text})"
    text = " ".join(text.removeprefix("Value error, ").split())
    if _OTHER_BUILD in text:
        text += f"; torchvision is of another build than torch: run `{_OTHER_BUILD_FIX}`"
    return f"{text}; --log-level debug shows all that vLLM printed"


def follow(spec: EngineSpec, described: EngineLaunch, ready: Callable[[], None]) -> None:
    """Run this node's device processes of a worker over several nodes; block until one of them ends.

    Args:
        spec: the engine, with `nodes`.
        described: engine arguments, and environment variables for the processes.
        ready: called once the processes have joined the others.

    Raises:
        ConfigError: vLLM cannot run here, or refuses the model or an argument.
        EngineError: one of them has ended.
    """
    output = ChildOutput("vllm")
    os.environ.update(described.environment)
    with output.taken():
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - an optional package of gigabytes
        from vllm.platforms import current_platform  # noqa: PLC0415
        from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: PLC0415

        check_platform(spec.device, current_platform.device_type)
        try:
            arguments = AsyncEngineArgs(**typed_arguments(spec, described.arguments, AsyncEngineArgs))
            config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=True)
            output.take_log("vllm")  # create_engine_config has set up the logger
            executor = MultiprocExecutor(config, monitor_workers=False)
        except ConfigError:
            raise
        except Exception as error:
            raise EngineError(f"engine vllm: {spec.model}: {why_it_does_not_start(error, output)}") from error
    ready()
    executor.start_worker_monitor(inline=True)
    raise EngineError(f"vLLM died: {output.reason() or 'one of its processes ended without an error text'}")
