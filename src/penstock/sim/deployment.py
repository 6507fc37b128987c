"""Makes a simulated deployment from a graph: role groups and the cluster spec."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TypeVar

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.core.ids import RequestId
from penstock.core.native import native
from penstock.core.types.events import Tier
from penstock.core.types.instances import ModelCard, Role
from penstock.core.types.requests import Request
from penstock.demo import MODEL_DIR
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.graph import DEMO_MODEL, Graph, RoleSpec
from penstock.graph.capacities import hardware_of
from penstock.graph.engine_prices import make_latency, make_roofline, with_step_size
from penstock.graph.partners import check_counts
from penstock.kv.groups import ONE_TABLE, Windows
from penstock.perf.hardware import Hardware
from penstock.perf.latency import LatencyModel, publish
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import ModelShape
from penstock.perf.profile import Profile, ProfiledModel
from penstock.perf.roofline import Factors, Roofline, price_per_token
from penstock.router.config import RouterConfig
from penstock.runtime.config import PlaneConfig
from penstock.sim.cluster import ClusterSpec, SimEngine, WorkerSpec
from penstock.sim.engine import ExactEngine, JumpEngine
from penstock.sim.engine_timing import VOCAB_SIZE, DecodePrices, HostPace, LowerTier, no_layout
from penstock.sim.network import NetworkConfig
from penstock.sim.workload import SimSession, SimStream, StreamOf

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

    def make_engine(self, pace: HostPace, stream_of: StreamOf, *, exact: bool) -> SimEngine:
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
            retention=self.spec.retention,
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


AnyConfig = TypeVar("AnyConfig", bound=Config)

SALT = b"simulated"
_WHOLE_ANSWER = 1 << 30  # credit window: bulk deltas are not split


@dataclass(frozen=True, slots=True)
class SimDeployment:
    """A graph's role groups, with costs."""

    graph: Graph
    shape: ModelShape
    role_groups: tuple[RoleGroup, ...]
    """By role; prefill last."""
    exact: bool = False
    """Whether engines run every step instead of jumping between events."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    slowness: tuple[float, ...] = ()
    """Slowdown factors of the first workers; the router does not know them."""

    @property
    def decoding(self) -> tuple[RoleGroup, ...]:
        """Role groups that decode: aggregated and decode."""
        return tuple(role_group for role_group in self.role_groups if role_group.role is not Role.PREFILL)

    @property
    def adapters(self) -> tuple[str, ...]:
        """LoRA adapters that requests may name; equal in all decoding roles."""
        return self.decoding[0].spec.adapters

    @property
    def devices(self) -> int:
        return sum(role_group.devices for role_group in self.role_groups)

    @property
    def expenses(self) -> str:
        """Price and power of a device, as text."""
        return ", ".join(dict.fromkeys(role_group.expenses for role_group in self.role_groups))

    @property
    def router(self) -> RouterConfig:
        """The graph's router settings; without KV bandwidth or locations in the graph, KV moves over the devices' network links."""
        config = self.graph.router
        is_said = config.disagg.link_bytes_per_s is not None or any(
            role_group.spec.locations for role_group in self.role_groups
        )
        if is_said or len(self.decoding) == len(self.role_groups):
            return config
        slowest = min(role_group.link_bytes_per_s for role_group in self.role_groups)
        disagg = config.disagg.model_copy(update={"link_bytes_per_s": slowest})
        return config.model_copy(update={"disagg": disagg})

    @property
    def link(self) -> str:
        """KV transfer bandwidth as text; empty without prefill workers."""
        prefill = [role_group for role_group in self.role_groups if role_group.role is Role.PREFILL]
        if not prefill:
            return ""
        bandwidth = self.router.kv_path(
            prefill[0].spec.location_of(0), self.decoding[0].spec.location_of(0)
        ).bandwidth_bytes_per_s
        return f"KV moves at {bandwidth / 1e9:.3g} GB/s"

    def check(self, sessions: Iterable[SimSession]) -> None:
        """Check that every request fits each worker that may get it, and that its adapter exists.

        Raises:
            ConfigError: a request does not fit; the text has the arithmetic.
        """
        sessions = list(sessions)
        turns = [turn for session in sessions for turn in session.turns]
        longest_tokens = max((turn.input_tokens + turn.output_tokens for turn in turns), default=0)
        longest_prompt_tokens = max((turn.input_tokens for turn in turns), default=0)
        num_adapters = max((s.adapter + 1 for s in sessions if s.adapter is not None), default=0)
        asked = self.graph.context_length
        if asked is not None and longest_tokens > asked:
            raise ConfigError(
                f"context_length: the longest request has {longest_tokens:,} tokens, prompt and output, got {asked:,};"
                " raise it, leave it out, or take a shorter trace"
            )
        for role_group in self.role_groups:
            if role_group.role is Role.PREFILL:
                role_group.check_fits(
                    longest_prompt_tokens + 1, "prompt, with the first token of its answer,"
                )
            else:
                role_group.check_fits(longest_tokens, "request")

        if num_adapters > len(self.adapters):
            raise ConfigError(
                f"{self.decoding[0].place}.adapters: the workload asks for {num_adapters} of them, and {len(self.adapters)}"
                " are listed; list more, or lower the workload's adapters"
            )

    def count_too_long(self, sessions: Iterable[SimSession]) -> int:
        """Count the prompts that no worker takes because they leave no token of the context for an answer."""
        prompts = (turn.input_tokens for session in sessions for turn in session.turns)
        return sum(tokens >= self.shape.context_length for tokens in prompts)

    def cluster_spec(self, streams: Mapping[RequestId, SimStream]) -> ClusterSpec:
        """Make the cluster spec.

        Args:
            streams: block names of the open requests.
        """
        graph = self.graph
        factors = chain(self.slowness, repeat(1.0))

        def stream_of(request: Request) -> SimStream:
            return streams[request.request_id]

        def worker_spec(role_group: RoleGroup) -> WorkerSpec:
            def make_engine(pace: HostPace) -> SimEngine:
                pace.factor = next(factors)
                return role_group.make_engine(pace, stream_of, exact=self.exact)

            return WorkerSpec(
                make_engine=make_engine,
                prices=publish(
                    make_latency(self.shape, role_group.spec), context_length=role_group.context_length
                ),
                adapters_of=role_group.spec.adapters_of,
                location_of=role_group.spec.location_of,
            )

        context_length = self.shape.context_length
        # Explanations and logs that nobody reads cost memory per request, and time to free at the end.
        replayed = {} if self.network.event_loss else {"replay_batches_max": 0}
        return ClusterSpec(
            card=ModelCard(
                name=graph.model, context_length=context_length, block_size=graph.block_size, salt=SALT
            ),
            workers={role_group.role: worker_spec(role_group) for role_group in self.role_groups},
            router=_with(self.router, explain={"decisions_max": 0}),  # no explanations
            # A step log would have wall-clock times.
            worker=_with(graph.worker.model_copy(update={"step_log": None}), events=replayed),
            network=self.network,
            plane=PlaneConfig(window_tokens=_WHOLE_ANSWER),
            frontends=graph.frontend.processes,
        )


def _with(config: AnyConfig, **changes: Mapping[str, object]) -> AnyConfig:
    """Copy a config with changed fields of its sub-configs."""
    parts = {name: getattr(config, name).model_copy(update=fields) for name, fields in changes.items()}
    return config.model_copy(update=parts)


def simulated_roles(graph: Graph) -> dict[Role, RoleSpec]:
    """Give the roles to simulate, prefill last.

    Raises:
        ConfigError: no worker decodes, or there are more workers than a router can know.
    """
    check_counts(graph.roles, graph.router.workers_max)
    roles = graph.roles.present()
    decoding = {role: spec for role, spec in roles.items() if role is not Role.PREFILL}
    return decoding | roles


def simulated_shape(graph: Graph, beside: Path) -> ModelShape:
    """Find the shape of a graph's model; a relative path is also tried from `beside`.

    Raises:
        ConfigError: the model is neither a known name nor a directory.
    """
    return find_shape(str(MODEL_DIR) if graph.model == DEMO_MODEL else graph.model, beside=beside)


def hardware_hint(graph: Graph, message: str) -> str:
    """Give the end of an error about the memory of hardware that was left out; empty for other errors."""
    is_left_out = " GB" in message and any(
        "hardware" not in spec.model_fields_set for spec in graph.roles.present().values()
    )
    return "; hardware was left out, which means cpu" if is_left_out else ""


def warn_of_exact() -> None:
    """Say on stderr that simulations run every step, if there is no native code; commands call it once."""
    if native is None:
        sys.stderr.write(
            "penstock: no native code: simulations run every engine step and take up to twenty times as long;"
            " install g++ and Python's headers, then reinstall without PENSTOCK_NATIVE=OFF\n"
        )


def plan_deployment(
    graph: Graph, *, beside: Path, engine_profile: Path | None = None, exact: bool = False
) -> SimDeployment:
    """Make the simulated deployment of a graph.

    Args:
        graph: roles in any mix.
        beside: second base of the model's relative path.
        engine_profile: profile that all simulated engines use, while the router keeps the graph's estimates.
        exact: engines run every step, as they always do without native code.

    Raises:
        ConfigError: the graph cannot be simulated, or does not fit its hardware.
    """
    roles = simulated_roles(graph)
    shape = simulated_shape(graph, beside)
    if graph.context_length is not None:
        if graph.context_length > shape.context_length:
            raise ConfigError(
                f"context_length: must be <= {shape.context_length}, the model's own, got {graph.context_length}"
            )
        shape = replace(shape, context_length=graph.context_length)
    role_groups = tuple(
        plan_role_group(role, spec, shape, block_size=graph.block_size, engine_profile=engine_profile)
        for role, spec in roles.items()
    )
    for role_group in role_groups:
        _check_batch(role_group)
    _check_alike(role_groups)
    return SimDeployment(graph, shape, role_groups, exact or native is None)


def _check_batch(role_group: RoleGroup) -> None:
    spec, place, usual = role_group.spec, role_group.place, SchedulerConfig()
    tokens = spec.max_batch_tokens or usual.max_batch_tokens
    running = spec.max_running_requests or usual.max_running_requests
    if running > tokens:
        raise ConfigError(
            f"{place}.max_batch_tokens: must be >= max_running_requests, a token of each in every step,"
            f" got {tokens} and {running}; raise it or lower {place}.max_running_requests"
        )
    verified = running * spec.verified_tokens
    if verified > tokens:
        raise ConfigError(
            f"{place}.tokens_per_step: {running} running requests x {spec.verified_tokens} tokens to verify are"
            f" {verified:,} in a step, more than its max_batch_tokens of {tokens}; raise that, or lower"
            f" {place}.max_running_requests"
        )


def _check_alike(role_groups: tuple[RoleGroup, ...]) -> None:
    """Check that all decoding roles can serve every request."""
    decoding = [role_group for role_group in role_groups if role_group.role is not Role.PREFILL]
    first = decoding[0]
    for role_group in decoding[1:]:
        if set(role_group.spec.adapters) != set(first.spec.adapters):
            raise ConfigError(
                f"{role_group.place}.adapters: must be those of {first.place}, as either may be asked for them, got"
                f" {', '.join(role_group.spec.adapters) or 'none'} and {', '.join(first.spec.adapters) or 'none'}"
            )


_TOKENS = 8192
_BYTES = 1 << 30


def say_break_even(groups: Iterable[RoleGroup]) -> Iterator[str]:
    """Say of each tier of each role what bandwidth pays, and what it has in simulation."""
    for group in groups:
        latency = group.latency
        tokens_per_s = _TOKENS / latency.prefill_s(_TOKENS, 0)
        needed = latency.kv_bytes_per_token * tokens_per_s
        for kind in group.lower_tiers:
            simulated = _BYTES / latency.onboard_s(_BYTES, kind.tier)
            verdict = "" if simulated > needed else ", so it helps only behind long prefixes, or not at all"
            yield (
                f"roles.{group.role}.kv.{kind.tier}: loading pays above {needed / 1e9:.2g} GB/s"
                f" ({latency.kv_bytes_per_token / 1e3:.3g} kB of KV a token x {tokens_per_s:,.0f} prompt tokens/s);"
                f" simulated at {simulated / 1e9:.2g} GB/s{verdict}"
            )
