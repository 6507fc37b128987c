"""A role group: the simulated workers of one role, with latency model, KV capacity and engines."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.types.events import Tier
from penstock.core.types.instances import Role
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.graph import RoleSpec
from penstock.graph.capacities import hardware_of
from penstock.graph.engine_prices import make_latency, make_roofline, with_step_size
from penstock.kv.groups.windows import ONE_TABLE, Windows
from penstock.perf.latency import LatencyModel
from penstock.perf.model.hardware import Hardware
from penstock.perf.model.shape import ModelShape
from penstock.perf.profile.profile import Profile, ProfiledModel
from penstock.perf.published import publish
from penstock.perf.roofline.factors import Factors
from penstock.perf.roofline.roofline import Roofline
from penstock.perf.roofline.speculation import price_per_token
from penstock.sim.engine.engine import JumpEngine
from penstock.sim.engine.exact import ExactEngine
from penstock.sim.engine.prices import DecodePrices
from penstock.sim.engine.timed_tier import LowerTier
from penstock.sim.engine.timing import VOCAB_SIZE, Pace, no_layout
from penstock.sim.workload.prompt import StreamOf
from penstock.sim.world.cluster import SimEngine

_QUEUE_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class RoleGroup:
    """The workers of one role, all alike."""

    role: Role
    spec: RoleSpec
    hardware: Hardware
    latency: LatencyModel
    prices: DecodePrices
    """Decode sums of `latency`, with a cache shared by all workers and runs."""
    block_size: int
    num_blocks: int
    context_length: int
    arithmetic: str
    """Calculation of the KV capacity, as text."""
    remedy: str
    """How to increase the KV capacity, as text."""
    profile: Profile | None = None
    """Measured profile of the engines; None is the roofline alone."""
    windows: Windows = ONE_TABLE
    """Sliding windows for which running requests hold blocks of their own."""
    lower_tiers: tuple[LowerTier, ...] = ()
    """(tier, blocks) of each tier below a worker's device, nearest first."""

    @property
    def place(self) -> str:
        """Path in the graph, for error texts."""
        return f"roles.{self.role}"

    @property
    def devices(self) -> int:
        """Devices of all its workers."""
        return self.spec.replicas * self.spec.devices

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, over all devices of a worker."""
        return int(self.latency.kv_bytes_per_token) * self.block_size

    @property
    def link_bytes_per_s(self) -> float:
        """Network bandwidth of a KV transfer from a worker: the sum of the links of all devices that hold a part."""
        spec = self.spec
        reached = self.hardware.scale_out_bytes_per_s * Factors().collective_bandwidth
        return reached * spec.tensor_parallel * spec.pipeline_parallel

    @property
    def expenses(self) -> str:
        """Price and power of a device, as text."""
        hardware = self.hardware
        return f"{hardware.name} at {hardware.usd_per_hour:g} USD an hour and {hardware.watts:,g} W a device"

    def check_fits(self, longest_tokens: int, what: str) -> None:
        """Check that a request fits a worker's KV.

        Args:
            longest_tokens: most KV tokens of one request on this worker.
            what: noun for the error text, such as "request".

        Raises:
            ConfigError: it does not fit; the text has the arithmetic.
        """
        budget = self.scheduler.prompt_budget
        capacity = self.windows.tokens_beside(self.num_blocks, budget, self.block_size)
        windows = ""
        if self.windows.layers:
            blocks = self.num_blocks - capacity // self.block_size
            windows = f" beside {blocks:,} blocks for its windows in a step of {budget:,} tokens"
        beneath = "; lower tiers hold only what does not run" if self.lower_tiers else ""
        whose = "a worker" if self.role is Role.AGGREGATED else f"a {self.role} worker"
        if longest_tokens > capacity:
            raise ConfigError(
                f"KV: the longest {what} has {longest_tokens:,} tokens, and {whose}'s KV holds {capacity:,}{windows}:"
                f" {self.arithmetic}{beneath}; {self.remedy}, or take a shorter trace"
            )

    def make_engine(self, pace: Pace, stream_of: StreamOf, *, exact: bool) -> SimEngine:
        """Create one worker's engine.

        Args:
            pace: speed of its host.
            stream_of: gives the block names of a request.
            exact: run every step instead of jumping between events.
        """
        info = RunnerInfo(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            context_length=self.context_length,
            vocab_size=VOCAB_SIZE,
            kv_bytes_per_block=self.block_bytes,
            kv_layout=no_layout(self.block_bytes, self.block_size, self.num_blocks),
            windows=self.windows,
        )
        if exact:
            return ExactEngine(
                self.latency, info, self.scheduler, pace, stream_of, lower_tiers=self.lower_tiers
            )
        return JumpEngine(
            self.latency,
            info,
            self.scheduler,
            stream_of,
            pace=pace,
            prices=self.prices,
            lower_tiers=self.lower_tiers,
        )

    @property
    def scheduler(self) -> SchedulerConfig:
        """Bounds of a worker's batch and queue."""
        return SchedulerConfig.of_ranks(
            self.spec.data_parallel,
            max_batch_tokens=self.spec.max_batch_tokens,
            max_running_requests=self.spec.max_running_requests,
            max_waiting_requests=_QUEUE_MAX,
            order=self.spec.prompt_order,
            ageing=self.spec.prompt_ageing,
            sessions=self.spec.sessions,
            eviction=self.spec.kv.eviction,
            tenant_share=self.spec.kv.tenant_share,
            prefetched_requests=self.spec.kv.prefetch,
        )


def plan_role_group(
    role: Role, spec: RoleSpec, shape: ModelShape, *, block_size: int, engine_profile: Path | None
) -> RoleGroup:
    """Make the role group of a role.

    Args:
        role: the role.
        spec: the graph's settings.
        shape: the model's shape.
        block_size: tokens in a block.
        engine_profile: profile that the simulated engines use, while the router keeps the graph's estimates.

    Raises:
        ConfigError: the role cannot be simulated, or does not fit its hardware.
    """
    spec = with_step_size(
        role, spec, lambda: publish(make_latency(shape, spec), context_length=shape.context_length)
    )
    hardware = hardware_of(spec)
    roofline = make_roofline(shape, spec)
    latency: LatencyModel = price_per_token(roofline)
    profile_path = engine_profile or spec.profile
    profile = None if profile_path is None else Profile.load(Path(profile_path))
    if profile is not None:
        latency = ProfiledModel(profile, latency)
    capacity = latency.kv_capacity_tokens
    if profile is not None and profile.kv_capacity_tokens:
        arithmetic = f"kv_capacity_tokens of the profile is {capacity:,}"
        remedy = "set kv_blocks, or kv_capacity_tokens in the profile"
    else:
        arithmetic = _memory_arithmetic(roofline, spec)
        remedy = "raise tensor_parallel or take hardware with more memory"
    num_blocks = capacity // block_size
    if spec.kv_blocks is not None:
        if spec.kv_blocks > num_blocks and profile is None:
            raise ConfigError(
                f"roles.{role}.kv_blocks: {spec.kv_blocks} blocks of {block_size} tokens do not fit: "
                f"{num_blocks} do, {arithmetic}"
            )
        num_blocks = spec.kv_blocks
        arithmetic = f"{num_blocks} blocks of {block_size} tokens (kv_blocks)"
        remedy = "raise kv_blocks"
    if num_blocks < 2:
        whose = "" if role is Role.AGGREGATED else f"roles.{role}: "
        raise ConfigError(
            f"{whose}KV: room for {num_blocks} blocks of {block_size} tokens, at least 2 are needed: {arithmetic};"
            f" {remedy}"
        )
    return RoleGroup(
        role,
        spec,
        hardware,
        latency,
        DecodePrices(latency, shape.context_length),
        block_size,
        num_blocks,
        shape.context_length,
        arithmetic,
        remedy,
        profile,
        _windows(shape, roofline),
        tuple(_lower_tiers(role, spec, num_blocks, latency.kv_bytes_per_token * block_size)),
    )


def _windows(shape: ModelShape, roofline: Roofline) -> Windows:
    """Give the windows with blocks of their own; a model with windows alone keeps the whole context in one table."""
    layers = Counter(window for window in shape.windows if window is not None)
    whole = shape.layers - layers.total()
    return Windows(tuple(sorted(layers.items())), whole) if roofline.frees_windows and whole else ONE_TABLE


def _lower_tiers(role: Role, spec: RoleSpec, num_blocks: int, block_bytes: float) -> Iterator[LowerTier]:
    for tier, size in spec.kv.present().items():
        if not size:
            raise ConfigError(
                f"roles.{role}.kv.{tier}: {spec.kv.object.url} has no size, which a simulation needs; give it, as"
                f" {spec.kv.object.url}:100GiB"
            )
        workers = _workers_on_a_host(spec) if tier is Tier.HOST else 1
        try:
            yield LowerTier(
                tier,
                size.shared_by(workers).blocks(num_blocks, block_bytes),
                spec.kv.eviction_of(tier),
            )
        except ConfigError as error:
            raise ConfigError(f"roles.{role}.kv.{tier}: {error.message}") from error


def _workers_on_a_host(spec: RoleSpec) -> int:
    """Count the role's workers on the host with most of them; a worker without a named host has one of its own."""
    hosts = Counter(spec.location_of(number).host for number in range(spec.replicas))
    return max((count for host, count in hosts.items() if host), default=1)


def _memory_arithmetic(roofline: Roofline, spec: RoleSpec) -> str:
    memory_bytes = roofline.hardware.memory_bytes * roofline.factors.memory_fraction
    text = (
        f"{memory_bytes / 1e9:.1f} GB of a device less {roofline.weight_bytes_per_device() / 1e9:.1f} GB of weights,"
        f" on {spec.devices} device{'s' if spec.devices > 1 else ''}, at {roofline.kv_bytes_per_token / 1e3:.1f} kB a token"
    )
    if roofline.kv_windows:
        sizes = " and ".join(f"{window:,}" for window, _ in roofline.kv_windows)
        text += f" beside sliding windows of {sizes} tokens for each request"
    return text + (f" on {roofline.kv_copies:g} of them each" if roofline.kv_copies > 1 else "")
