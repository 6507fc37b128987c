"""Makes a simulated deployment from a graph: role groups and the cluster spec."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TypeVar

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.core.ids import RequestId
from penstock.core.native import native
from penstock.core.types.instances import ModelCard, Role
from penstock.core.types.requests import Request
from penstock.demo import MODEL_DIR
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.graph import DEMO_MODEL, Graph, RoleSpec
from penstock.graph.engine_prices import make_latency
from penstock.graph.partners import check_counts
from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.shape import ModelShape
from penstock.perf.published import publish
from penstock.router.config import RouterConfig
from penstock.runtime.config import PlaneConfig
from penstock.sim.engine.timing import Pace
from penstock.sim.role_group import RoleGroup, plan_role_group
from penstock.sim.workload.prompt import Stream
from penstock.sim.workload.workload import Session
from penstock.sim.world.cluster import ClusterSpec, SimEngine, WorkerSpec
from penstock.sim.world.network import NetworkConfig

AnyConfig = TypeVar("AnyConfig", bound=Config)

SALT = b"simulated"
_WHOLE_ANSWER = 1 << 30  # credit window: bulk deltas are not split


@dataclass(frozen=True, slots=True)
class Deployment:
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

    def check(self, sessions: Iterable[Session]) -> None:
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

    def count_too_long(self, sessions: Iterable[Session]) -> int:
        """Count the prompts that no worker takes because they leave no token of the context for an answer."""
        prompts = (turn.input_tokens for session in sessions for turn in session.turns)
        return sum(tokens >= self.shape.context_length for tokens in prompts)

    def cluster_spec(self, streams: Mapping[RequestId, Stream]) -> ClusterSpec:
        """Make the cluster spec.

        Args:
            streams: block names of the open requests.
        """
        graph = self.graph
        factors = chain(self.slowness, repeat(1.0))

        def stream_of(request: Request) -> Stream:
            return streams[request.request_id]

        def worker_spec(role_group: RoleGroup) -> WorkerSpec:
            def make_engine(pace: Pace) -> SimEngine:
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
) -> Deployment:
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
    return Deployment(graph, shape, role_groups, exact or native is None)


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
