"""The part of a deployment that one host runs: roles, frontends and planner; and the checks of roles."""

import os
from dataclasses import dataclass
from typing import Self

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.core.types.instances import ModelCard, Role
from penstock.engine.registry import engine_kind
from penstock.graph import Graph, RoleSpec
from penstock.graph.partners import check_counts

FRONTEND = "frontend"
PLANNER = "planner"
_WORKER_BYTES = 48 << 20
"""Least memory of a worker process: the mock engine's 80 MB, of which 30 are shared (Python 3.11)."""


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What this host runs.

    Attributes:
        roles: workers by role, None for as many as the graph says; None for all roles of the graph.
        has_frontends: whether the frontends run here.
        has_planner: whether the planner runs here; None where the graph's registry is not another host's.
    """

    roles: dict[Role, int | None] | None = None
    has_frontends: bool = True
    has_planner: bool | None = None

    @classmethod
    def parse(cls, text: str, roles: dict[Role, RoleSpec]) -> Self:
        """Read `frontend,decode=2`.

        Raises:
            ConfigError: a name is no role of the graph, or a number is none.
        """
        chosen: dict[Role, int | None] = {}
        has_frontends = has_planner = False
        for item in filter(None, (item.strip() for item in text.split(","))):
            name, equals, number = item.partition("=")
            if name == FRONTEND and not equals:
                has_frontends = True
            elif name == PLANNER and not equals:
                has_planner = True
            elif name in roles:
                if equals and not (number.isascii() and number.isdecimal()):
                    raise ConfigError(f"--run {item}: must be ROLE=N with N >= 0, got {number!r}")
                chosen[Role(name)] = int(number) if equals else None
            else:
                known = [FRONTEND, PLANNER, *(role.value for role in roles)]
                raise ConfigError(f"--run {item}: {name!r} is not in the graph{nearest(name, known)}")
        if not (chosen or has_frontends or has_planner):
            raise ConfigError(
                f"--run {text!r}: names nothing to run; such as --run {FRONTEND},{next(iter(roles))}"
            )
        return cls(chosen, has_frontends, has_planner)

    def plans(self, graph: Graph) -> bool:
        """Tell whether the planner of `graph` runs here.

        Raises:
            ConfigError: it should, and the graph has none.
        """
        if self.has_planner and graph.planner is None:
            raise ConfigError(
                f"--run {PLANNER}: the graph has no planner; add planner: {{}} and planner.address"
            )
        if graph.planner is None:
            return False
        if not graph.runtime.spans_hosts:
            return True
        return graph.runtime.join is None if self.has_planner is None else self.has_planner

    def of(self, roles: dict[Role, RoleSpec]) -> dict[Role, RoleSpec]:
        """Give the roles that run here, with their numbers of workers."""
        if self.roles is None:
            return roles
        return {
            role: spec if count is None else spec.model_copy(update={"replicas": count})
            for role, spec in roles.items()
            if role in self.roles
            for count in (self.roles[role],)
        }


def roles_here(part: LocalPart, graph: Graph) -> dict[Role, RoleSpec]:
    """Check and return the roles that this host runs, with their numbers of workers.

    Raises:
        ConfigError: the graph has a setting that only simulations support, or this host cannot hold so many workers.
    """
    roles = part.of(runnable_roles(graph))
    for role, spec in roles.items():
        if spec.replicas_max is not None and spec.replicas > spec.replicas_max:
            raise ConfigError(
                f"--run {role}={spec.replicas}: roles.{role}.replicas_max is {spec.replicas_max}; raise it or run fewer"
            )
    check_nodes(graph, roles)
    _check_count(roles, graph.router.workers_max)
    return roles


def _check_count(roles: dict[Role, RoleSpec], workers_max: int) -> None:
    """Check that a router may know so many workers, and that this host's memory holds them.

    Raises:
        ConfigError: there are too many.
    """
    names = ", ".join(f"{role}={spec.replicas}" for role, spec in roles.items())
    if (workers := sum(spec.replicas for spec in roles.values())) > workers_max:
        raise ConfigError(
            f"{names}: {workers:,} workers here, but a router knows at most {workers_max:,} (router.workers_max); run fewer or"
            " raise it"
        )
    unbounded = {role: spec.replicas for role, spec in roles.items() if spec.replicas_max is None}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(1, memory // _WORKER_BYTES)
    if (count := sum(unbounded.values())) > most:
        largest = max(unbounded, key=lambda role: unbounded[role])
        raise ConfigError(
            f"{names}: {count:,} worker processes take {count * _WORKER_BYTES / 1e9:.1f} GB at the least, and this host has"
            f" {memory / 1e9:.1f} GB, enough for {most:,}; run fewer here, or set roles.{largest}.replicas_max to start them"
            " all the same"
        )


def runnable_roles(graph: Graph) -> dict[Role, RoleSpec]:
    """Check and return the roles to run on this machine.

    Raises:
        ConfigError: the graph has a setting that only simulations support.
    """
    roles = graph.roles.present()
    for name, role in roles.items():
        if engine_kind(role.engine).is_parallel:
            continue
        for field in ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel"):
            degree = getattr(role, field)
            if degree != 1:
                raise ConfigError(f"roles.{name}.{field}: must be 1 in this version, got {degree}")
        if role.kv_dtype not in {"auto", role.weight_dtype}:
            raise ConfigError(
                f"roles.{name}.kv_dtype: must be auto or that of the weights in this version, got {role.kv_dtype}"
            )
    check_counts(graph.roles, graph.router.workers_max)
    return roles


def check_nodes(graph: Graph, roles: dict[Role, RoleSpec]) -> None:
    """Check that this host may lead the worker over several nodes among `roles`.

    Raises:
        ConfigError: there are two such workers, or `runtime.leader` is not set.
    """
    spanning = {role: spec for role, spec in roles.items() if spec.nodes > 1 and spec.replicas}
    for role, spec in spanning.items():
        ranks = "1" if spec.nodes == 2 else f"1 to {spec.nodes - 1}"
        if graph.runtime.leader is None:
            raise ConfigError(
                f"roles.{role}.nodes: {spec.nodes}: each node of a worker runs `penstock up` of its own; start it here with"
                f" --run {role}=1 --leader tcp://ADDRESS_OF_THIS_HOST:7405, on the others --run {role} --node-rank {ranks} with the"
                " same --leader (docs/many-machines.md)"
            )
        if spec.replicas > 1 or len(spanning) > 1:
            raise ConfigError(
                f"roles.{role}: {spec.replicas} workers over {spec.nodes} nodes: a host leads one; run {role}=1 here, and each of the"
                " others by a `penstock up` on another host, with a --leader of its own"
            )


def followed_role(graph: Graph, part: LocalPart, rank: int) -> Role:
    """Give the role whose worker this host follows.

    Raises:
        ConfigError: `part` is not exactly one role with `nodes`, `rank` is not a follower's, or `runtime.leader` is not set.
    """
    spanning = {role: spec for role, spec in part.of(runnable_roles(graph)).items() if spec.nodes > 1}
    if len(spanning) != 1 or part.has_frontends or part.has_planner:
        named = "none" if not spanning else "more than that"
        raise ConfigError(
            f"--node-rank {rank}: a node follows one worker of several nodes and runs nothing else, and --run names {named}; name the"
            " role alone, as --run decode, and give it nodes in the graph"
        )
    ((role, spec),) = spanning.items()
    if not 1 <= rank < spec.nodes:
        raise ConfigError(
            f"--node-rank {rank}: roles.{role} has nodes {spec.nodes}, of which 0 leads; give 1 to {spec.nodes - 1}"
        )
    if graph.runtime.leader is None:
        raise ConfigError(
            f"--node-rank {rank}: nothing says where node 0 of roles.{role} is; add its --leader, as tcp://10.0.0.1:7405"
        )
    return role


def expect_same_blocks(cards: dict[Role, ModelCard]) -> None:
    """Check that all roles' KV blocks are interchangeable.

    Raises:
        ConfigError: their block-hash salts differ.
    """
    first, *others = cards
    for other in others:
        if cards[other].salt != cards[first].salt:
            raise ConfigError(
                f"roles.{first} and roles.{other}: their KV differs, so no KV block could be transferred or reused between them;"
                " give both the same engine, weight_dtype, expert_dtype and kv_dtype"
            )
