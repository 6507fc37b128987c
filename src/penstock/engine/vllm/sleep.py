"""vLLM's sleep mode: what it needs, and how it wakes from each level."""

from typing import Any

from penstock.core.errors import RequestError
from penstock.engine.spec import EngineSpec

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
