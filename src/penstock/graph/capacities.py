"""What one worker of each role can do, from the graph: for the planner."""

from pathlib import Path

from penstock.core.config import wrong
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Prices, Role
from penstock.engine.registry import MOCK_BLOCKS, engine_kind
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.graph.engine_prices import engine_prices, make_roofline, with_step_size
from penstock.graph.role import Roles, RoleSpec
from penstock.perf.hardware import Hardware, find_hardware
from penstock.perf.model_config import load_shape
from penstock.perf.model_shape import ModelShape, Parallel
from penstock.perf.profile import LinearPrior, Profile, ProfiledModel
from penstock.perf.roofline import price_per_token
from penstock.planner.capacity import Capacity, WorkerModel
from penstock.planner.config import PlannerBudget, PlannerConfig, kinds_of

_CPU_KV_BYTES = 1 << 30
"""KV of a paged engine on a CPU where the graph does not say."""
_OWN_ENGINES = ("mock", "paged")
"""Engines that run requests by `SchedulerConfig`."""


def hardware_of(spec: RoleSpec) -> Hardware:
    """Give a role's devices, with the graph's price and power where it has them."""
    own = {"usd_per_hour": spec.usd_per_hour, "watts": spec.watts}
    given = {name: value for name, value in own.items() if value is not None}
    return find_hardware(spec.hardware).model_copy(update=given)


def cost_of(spec: RoleSpec, budget: PlannerBudget | None) -> float:
    """Give what one worker of a role costs in the unit of a budget; in GPUs without a budget."""
    if budget is None or budget.gpus is not None:
        return spec.devices
    return spec.devices * hardware_of(spec).usd_per_hour


def make_capacity(
    role: Role,
    spec: RoleSpec,
    *,
    model_dir: Path,
    block_size: int,
    budget: PlannerBudget | None = None,
    shape: ModelShape | None = None,
) -> Capacity:
    """Make the capacity of a role's workers: by the profile, by a mock engine's settings, or by the roofline.

    Args:
        role: the role.
        spec: its settings.
        model_dir: the checkpoint's directory.
        block_size: tokens in a KV block.
        budget: prices are in its unit.
        shape: the model's shape; None reads the checkpoint's.

    Raises:
        ConfigError: step times cannot be predicted: no profile is given, and the model's architecture is unknown or its weights
            do not fit the hardware.
    """
    parallel = Parallel(
        tp=spec.tensor_parallel, pp=spec.pipeline_parallel, ep=spec.expert_parallel, dp=spec.data_parallel
    )
    try:
        if spec.engine == "mock" and spec.profile is None:
            blocks = spec.kv_blocks or MOCK_BLOCKS
            model = WorkerModel(_linear(spec.mock.prices()), parallel, kv_tokens=blocks * block_size)
        else:
            model = _measured_or_predicted(spec, shape or load_shape(model_dir), parallel, block_size)
        sized = with_step_size(role, spec, lambda: engine_prices(spec, model_dir))
    except ConfigError as error:
        raise ConfigError(
            f"planner: roles.{role}: step times cannot be predicted: {error.message}; give roles.{role}.profile, which"
            " penstock profile measures, or leave planner out"
        ) from error
    defaults = SchedulerConfig()
    running = spec.max_running_requests
    if running is None and spec.engine in _OWN_ENGINES:
        running = defaults.max_running_requests
    return Capacity(
        role=role,
        model=model,
        max_batch_tokens=sized.max_batch_tokens or defaults.max_batch_tokens,
        block_size=block_size,
        requests_max=None if running is None else running * spec.data_parallel,
        price=None if budget is None or budget.gpus is not None else cost_of(spec, budget),
    )


def is_predicted(spec: RoleSpec) -> bool:
    """Tell whether step times come from a data sheet alone, neither measured nor set."""
    return spec.profile is None and spec.engine != "mock"


def unscalable(spec: RoleSpec) -> str:
    """Say why a role's workers cannot be more or fewer; empty if they can."""
    counter = engine_kind(spec.engine).count_workers
    if counter is None or counter(spec.engine_args) is None:
        return ""
    return f"engine {spec.engine!r} has one worker for each url, so no worker can be added or taken away"


def _measured_or_predicted(
    spec: RoleSpec, shape: ModelShape, parallel: Parallel, block_size: int
) -> WorkerModel:
    roofline = make_roofline(shape, spec)
    latency = price_per_token(roofline)
    profile = None if spec.profile is None else Profile.load(Path(spec.profile))
    kv_tokens = _kv_tokens(spec, block_size, latency.kv_bytes_per_token)
    if profile is not None:
        return WorkerModel(ProfiledModel(profile, latency), parallel, kv_tokens=kv_tokens)
    return WorkerModel(latency, parallel, kv_tokens=kv_tokens, verified_tokens=roofline.verified_tokens)


def _kv_tokens(spec: RoleSpec, block_size: int, kv_bytes_per_token: float) -> int | None:
    """Give the tokens of KV that the graph says a worker holds; None if it does not say."""
    if spec.kv_blocks is not None:
        return spec.kv_blocks * block_size
    if spec.engine == "paged" and spec.hardware == "cpu":
        return int(_CPU_KV_BYTES / kv_bytes_per_token)
    return None


def _linear(prices: Prices) -> LinearPrior:
    return LinearPrior(
        (prices.prefill_step_s, prices.prefill_token_s, prices.prefill_pair_s, 0.0),
        (prices.decode_step_s, prices.decode_sequence_s, prices.decode_token_s),
    )


def check_planner(planner: PlannerConfig, roles: Roles) -> None:
    """Check bounds and budget against the roles.

    Raises:
        PydanticCustomError: the planner cannot scale a role, or may not have as many workers as there are.
    """
    present = roles.present()
    try:
        planner.check_roles(present.keys())
    except ConfigError as error:
        raise wrong(error.message) from error
    for role, spec in present.items():
        if why := unscalable(spec):
            raise wrong(f"planner: roles.{role}: {why}; leave planner out")
        _, most = planner.bounds(role)
        if spec.replicas > most:
            raise wrong(
                f"roles.{role}.replicas is {spec.replicas}, planner.max_workers {most} for {role}; lower one or raise the other"
            )
    if planner.budget is None:
        return
    unit, amount = next(iter(planner.budget.model_dump(exclude_none=True).items()))
    for kind in kinds_of(present.keys()):
        needed = sum(planner.bounds(role)[0] * cost_of(present[role], planner.budget) for role in kind)
        if amount < needed:
            each = " and ".join(f"{planner.bounds(role)[0]} {role}" for role in sorted(kind))
            raise wrong(
                f"planner.budget.{unit} is {amount:g}, and {each} cost {needed:g}; raise it, or lower min_workers"
            )
