"""What a graph says, as a simulated deployment: prices, capacities, and the cluster that has them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.ids import RequestId
from penstock.core.types import ModelCard, Request, Tier
from penstock.demo import MODEL_DIR
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduler_config import SchedulerConfig
from penstock.graph import DEMO_MODEL, Graph, RoleSpec
from penstock.graph.engine_prices import make_latency, make_roofline
from penstock.perf.catalogue import find_shape
from penstock.perf.hardware import Hardware, find_hardware
from penstock.perf.latency import LatencyModel
from penstock.perf.profile import Profile, ProfiledModel
from penstock.perf.published import publish
from penstock.perf.roofline import Roofline
from penstock.perf.shape import ModelShape
from penstock.perf.speculation import price_per_token
from penstock.runtime.config import PlaneConfig
from penstock.sim.cluster import ClusterSpec, SimEngine
from penstock.sim.engine import JumpEngine
from penstock.sim.exact import ExactEngine
from penstock.sim.network import NetworkConfig
from penstock.sim.prices import DecodePrices
from penstock.sim.prompt import Stream
from penstock.sim.timing import VOCAB_SIZE, Pace

SALT = b"simulated"
_QUEUE_MAX = 1 << 20
_WHOLE_ANSWER = 1 << 30  # bulk deltas are not cut into windows


@dataclass(frozen=True, slots=True)
class Deployment:
    """A graph's workers, all alike, with what they cost."""

    graph: Graph
    role: RoleSpec
    shape: ModelShape
    hardware: Hardware
    latency: LatencyModel
    prices: DecodePrices
    """Of the same latency; every worker and every run share what they find out."""
    num_blocks: int
    context_length: int
    arithmetic: str
    """How the KV capacity comes about; for people."""
    remedy: str
    """What makes it larger; for people."""
    profile: Profile | None = None
    """What the engines run on instead of the roofline alone."""
    exact: bool = False
    """Whether engines take every step, instead of jumping from event to event."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    lower_blocks: tuple[tuple[Tier, int], ...] = ()
    """Of each tier beneath a worker's device, nearest first."""
    slowness: tuple[float, ...] = ()
    """The first workers to be started take so many times as long for everything, which nobody tells the router."""

    @property
    def devices(self) -> int:
        return self.role.replicas * self.role.devices

    @property
    def expenses(self) -> str:
        """What a device costs and draws; for people."""
        hardware = self.hardware
        return f"{hardware.name} at {hardware.usd_per_hour:g} USD an hour and {hardware.watts:,g} W a device"

    def check_fits(self, longest_tokens: int) -> None:
        """Refuse a workload whose longest request can never run.

        Raises:
            ConfigError: with the arithmetic.
        """
        capacity = self.num_blocks * self.graph.block_size
        beneath = "; lower tiers hold only what does not run" if self.lower_blocks else ""
        if longest_tokens > capacity:
            raise ConfigError(
                f"KV: the longest request has {longest_tokens:,} tokens, and a worker's KV holds {capacity:,}:"
                f" {self.arithmetic}{beneath}; {self.remedy}, or take a shorter trace"
            )

    def check_adapters(self, num_adapters: int) -> None:
        """Refuse a workload that asks for more adapters than there are.

        Raises:
            ConfigError: with both numbers.
        """
        if num_adapters > len(self.role.adapters):
            raise ConfigError(
                f"roles.aggregated.adapters: the workload asks for {num_adapters} of them, and {len(self.role.adapters)}"
                " are listed; list more, or lower the workload's adapters"
            )

    def cluster_spec(self, streams: Mapping[RequestId, Stream]) -> ClusterSpec:
        """Describe the cluster.

        Args:
            streams: names the blocks of every request under way.
        """
        graph, size = self.graph, self.graph.block_size
        info = RunnerInfo(
            num_blocks=self.num_blocks,
            block_size=size,
            context_length=self.context_length,
            vocab_size=VOCAB_SIZE,
            lower_blocks=self.lower_blocks,
        )
        scheduler = SchedulerConfig.of_ranks(
            self.role.data_parallel,
            max_batch_tokens=self.role.max_batch_tokens,
            max_running_requests=self.role.max_running_requests,
            max_waiting_requests=_QUEUE_MAX,
        )
        factors = chain(self.slowness, repeat(1.0))

        def stream_of(request: Request) -> Stream:
            return streams[request.request_id]

        def make_engine(pace: Pace) -> SimEngine:
            pace.factor = next(factors)
            if self.exact:
                return ExactEngine(self.latency, info, scheduler, pace, stream_of)
            return JumpEngine(self.latency, info, scheduler, stream_of, pace=pace, prices=self.prices)

        return ClusterSpec(
            card=ModelCard(name=graph.model, context_length=self.context_length, block_size=size, salt=SALT),
            make_engine=make_engine,
            prices=publish(make_latency(self.shape, self.role), context_length=self.context_length),
            router=graph.router,
            worker=graph.worker,
            network=self.network,
            plane=PlaneConfig(window_tokens=_WHOLE_ANSWER),
            frontends=graph.frontend.processes,
            adapters_of=self.role.adapters_of,
            location_of=self.role.location_of,
        )


def simulated_role(graph: Graph) -> RoleSpec:
    """Give the one role that this version simulates.

    Raises:
        ConfigError: the graph asks for more.
    """
    return graph.roles.only_aggregated("cannot be simulated in this version")


def plan_deployment(
    graph: Graph, *, beside: Path, engine_profile: Path | None = None, exact: bool = False
) -> Deployment:
    """Price a graph's workers.

    Args:
        graph: aggregated workers only.
        beside: the directory that a model's relative path may start from.
        engine_profile: what the simulated engines run on instead of what the router expects of them.
        exact: take every step.

    Raises:
        ConfigError: the graph describes something that cannot be simulated, or that does not fit.
    """
    role = simulated_role(graph)
    shape = find_shape(str(MODEL_DIR) if graph.model == DEMO_MODEL else graph.model, beside=beside)
    own = {"usd_per_hour": role.usd_per_hour, "watts": role.watts}
    hardware = find_hardware(role.hardware).model_copy(
        update={name: value for name, value in own.items() if value is not None}
    )
    roofline = make_roofline(shape, role)
    latency = price_per_token(roofline)
    profile_path = engine_profile or role.profile
    profile = None if profile_path is None else Profile.load(Path(profile_path))
    if profile is not None:
        latency = ProfiledModel(profile, latency)
    capacity = latency.kv_capacity_tokens
    if profile is not None and profile.kv_capacity_tokens:
        arithmetic = f"kv_capacity_tokens of the profile is {capacity:,}"
        remedy = "set kv_blocks, or kv_capacity_tokens in the profile"
    else:
        arithmetic = _memory_arithmetic(roofline, role)
        remedy = "raise tensor_parallel or take hardware with more memory"
    num_blocks = capacity // graph.block_size
    if role.kv_blocks is not None:
        if role.kv_blocks > num_blocks and profile is None:
            raise ConfigError(
                f"roles.aggregated.kv_blocks: {role.kv_blocks} blocks of {graph.block_size} tokens do not fit: "
                f"{num_blocks} do, {arithmetic}"
            )
        num_blocks = role.kv_blocks
        arithmetic = f"{num_blocks} blocks of {graph.block_size} tokens (kv_blocks)"
        remedy = "raise kv_blocks"
    if num_blocks < 2:
        raise ConfigError(
            f"KV: room for {num_blocks} blocks of {graph.block_size} tokens, at least 2 are needed: {arithmetic};"
            f" {remedy}"
        )
    prices = DecodePrices(latency, shape.context_length)
    return Deployment(
        graph,
        role,
        shape,
        hardware,
        latency,
        prices,
        num_blocks,
        shape.context_length,
        arithmetic,
        remedy,
        profile,
        exact,
        lower_blocks=tuple(_lower_blocks(role, num_blocks, latency.kv_bytes_per_token * graph.block_size)),
    )


def _lower_blocks(role: RoleSpec, num_blocks: int, block_bytes: float) -> Iterator[tuple[Tier, int]]:
    for tier, size in role.kv_tiers.present().items():
        count = int(size * num_blocks)
        if count < 1:
            raise ConfigError(
                f"roles.aggregated.kv_tiers.{tier}: {size:g} x {num_blocks:,} blocks on the device ({num_blocks * block_bytes / 1e9:.3g}"
                f" GB) is less than one of {block_bytes / 1e6:.3g} MB; expected >= {1 / num_blocks:.2g}, or 0 for none"
            )
        yield tier, count


def _memory_arithmetic(roofline: Roofline, role: RoleSpec) -> str:
    memory_bytes = roofline.hardware.memory_bytes * roofline.factors.memory_fraction
    text = (
        f"{memory_bytes / 1e9:.1f} GB of a device less {roofline.weight_bytes_per_device() / 1e9:.1f} GB of weights,"
        f" on {role.devices} device{'s' if role.devices > 1 else ''}, at {roofline.kv_bytes_per_token / 1e3:.1f} kB a token"
    )
    return text + (f" on {roofline.kv_copies:g} of them each" if roofline.kv_copies > 1 else "")
