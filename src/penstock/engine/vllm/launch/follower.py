"""vLLM's processes on a follower: the same as `vllm serve --headless` runs."""

import os
from collections.abc import Callable

from penstock.core.errors import ConfigError, EngineError
from penstock.engine.child_output import ChildOutput
from penstock.engine.launch import EngineLaunch
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.launch.arguments import check_platform, typed_arguments
from penstock.engine.vllm.launch.launch import why_it_does_not_start


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
