"""Latency estimates of a role's workers, from the graph's profile, mock settings or hardware, and the step size that follows from them."""

from collections.abc import Callable
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Prices, Role
from penstock.graph.role import RoleSpec
from penstock.perf.hardware import Dtype, find_hardware
from penstock.perf.latency import LatencyModel, publish, saturating_tokens
from penstock.perf.model_config import load_shape
from penstock.perf.model_shape import ModelShape, Parallel
from penstock.perf.profile import Profile, ProfiledModel
from penstock.perf.roofline import Roofline, price_per_token

_NAMED = {"float32": Dtype.FP32, "bfloat16": Dtype.BF16, "float16": Dtype.FP16}


def engine_prices(role: RoleSpec, model_dir: Path) -> Prices:
    """Give the latency coefficients that a worker reports to routers: from the role's profile, if it has one.

    Without a profile, the mock engine's come from its settings, other engines' from the roofline.

    Raises:
        ConfigError: the model's architecture is unknown, the parallelism does not fit it, or the profile cannot be read.
    """
    if role.engine == "mock" and role.profile is None:
        return role.mock.prices()
    shape = load_shape(model_dir)
    return publish(make_latency(shape, role), context_length=shape.context_length)


def make_latency(shape: ModelShape, role: RoleSpec) -> LatencyModel:
    """Make the latency model of one worker: its profile over the roofline, or the roofline alone.

    Raises:
        ConfigError: the parallelism does not fit the model, or the profile cannot be read.
    """
    roofline = make_roofline(shape, role)
    if role.profile is None:
        return price_per_token(roofline)
    return ProfiledModel(Profile.load(Path(role.profile)), roofline)


def make_roofline(shape: ModelShape, role: RoleSpec) -> Roofline:
    """Make the roofline of one worker of a role.

    Raises:
        ConfigError: the parallelism does not fit the model.
    """
    return Roofline(
        shape,
        find_hardware(role.hardware),
        Parallel(
            tp=role.tensor_parallel,
            pp=role.pipeline_parallel,
            ep=role.expert_parallel,
            dp=role.data_parallel,
        ),
        weight_dtype=_dtype(role.weight_dtype),
        kv_dtype=_dtype(role.kv_dtype),
        expert_dtype=_dtype(role.expert_dtype),
        tokens_per_step=role.tokens_per_step,
        draft_tokens=role.draft_tokens,
        frees_windows=_frees_windows(role),
    )


def _frees_windows(role: RoleSpec) -> bool:
    """Tell whether a role's engine frees KV that fell out of sliding windows: vLLM by default, and `paged` on CPUs never."""
    if role.engine == "paged" and role.hardware == "cpu":
        return False
    return role.engine_args.get("disable_hybrid_kv_cache_manager") is not True


def _dtype(name: str) -> Dtype | None:
    return None if name == "auto" else _NAMED.get(name) or Dtype(name)


def with_step_size(role: Role, spec: RoleSpec, prices: Callable[[], Prices]) -> RoleSpec:
    """Set the smallest step size at full utilization for prefill workers; other roles stay as they are.

    Args:
        role: the role of `spec`.
        spec: the graph's settings.
        prices: gives the workers' latency coefficients; on its ConfigError the engine's default stays.
    """
    if role is not Role.PREFILL or spec.max_batch_tokens is not None:
        return spec
    try:
        tokens = saturating_tokens(prices())
    except ConfigError:
        return spec
    return spec.model_copy(update={"max_batch_tokens": max(tokens, spec.max_running_requests or 0)})
