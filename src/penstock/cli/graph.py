"""`penstock graph check` and `penstock graph render`: which commands take a graph, and what each worker's engine would be started with."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from penstock.cli.parser import Parser, add_set
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.demo import MODEL_DIR
from penstock.deploy.card import check_checkpoint, check_model, open_checkpoint
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.deploy.supervisor.links import check_files
from penstock.deploy.supervisor.local_part import check_nodes, expect_same_blocks, runnable_roles
from penstock.deploy.supervisor.planning import capacities_of
from penstock.deploy.supervisor.resources import (
    Devices,
    HostExtents,
    ProcessCores,
    computes_here,
    expect_one_machine,
)
from penstock.deploy.supervisor.scale_file import declared_workers
from penstock.deploy.supervisor.worker_pool import PoolWorker, WorkerCapacity
from penstock.engine.launch import SymbolicHost
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.registry import describe_launch
from penstock.frontend.http.server import ServerTls
from penstock.frontend.limits.keys import read_tenants
from penstock.graph import DEMO_MODEL, Graph, Overrides, load
from penstock.graph.partners import check_counts, say_empty, say_small_kv
from penstock.runtime.tls import PlaneTls
from penstock.sim.deployment import (
    hardware_hint,
    plan_deployment,
    say_break_even,
    simulated_roles,
    simulated_shape,
)

EXIT_NO_COMMAND = 2


def add_graph(parser: Parser) -> None:
    """Add the arguments of `penstock graph`."""
    parser.description = "Work with deployment graphs."
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="say which commands take a graph",
        description="Say every mistake of a graph in one line, or which of penstock serve and penstock simulate take it.",
        epilog="Exit code: 2 if the graph has a mistake, or if neither command takes it.",
    )
    check.set_defaults(run=_check)
    render = actions.add_parser(
        "render",
        help="print what each worker would be started with",
        description="Print for each worker of a graph the engine's arguments, its environment and its GPUs. Nothing is started,"
        " and neither the engine nor the model has to be here.",
        epilog="What a start finds on its machine has a name instead of a value, such as <NIXL port>. Lines with # say what"
        " is not final. Exit code: 2 if the graph has a mistake, or its engine cannot have a setting.",
    )
    render.add_argument("--json", action="store_true", help="as JSON, each worker by itself")
    render.set_defaults(run=_render)
    for action in (check, render):
        action.add_argument("file", metavar="FILE", help="YAML, or Python that sets `graph`")
        add_set(action, "set a field, as for serve")


def _render(options: argparse.Namespace) -> int:

    graph = load(options.file, Overrides(options.set))
    print(render(graph, as_json=options.json), end="")  # noqa: T201
    return 0


def _check(options: argparse.Namespace) -> int:

    graph = load(options.file, Overrides(options.set))
    roles = ", ".join(
        f"{spec.replicas} {role} ({spec.engine})" for role, spec in graph.roles.present().items()
    )
    print(f"{options.file}: {graph.model}, {roles}, frontend on port {graph.frontend.port}")  # noqa: T201
    if graph.planner is not None:
        bounds = ", ".join(
            f"{least} to {most} {role}"
            for role in graph.roles.present()
            for least, most in (graph.planner.bounds(role),)
        )
        print(f"{options.file}: a planner scales {bounds}")  # noqa: T201
    for line in (*say_empty(graph.roles), *say_small_kv(graph.roles, graph.block_size)):
        print(f"{options.file}: {line}")  # noqa: T201

    def check_simulate() -> None:
        beside = Path(options.file).parent
        simulated_roles(graph)
        simulated_shape(graph, beside)
        try:
            deployment = plan_deployment(graph, beside=beside)
        except ConfigError as error:
            raise ConfigError(error.message + hardware_hint(graph, error.message)) from error
        for line in say_break_even(deployment.role_groups):
            print(f"{options.file}: {line}")  # noqa: T201

    is_taken = False
    for command, check in (("serve", partial(check_serve, graph)), ("simulate", check_simulate)):
        try:
            check()
        except ConfigError as error:
            verdict = f"refuses it: {error.message}"
        else:
            verdict, is_taken = "takes it", True
        print(f"{options.file}: penstock {command} {verdict}")  # noqa: T201
    return 0 if is_taken else EXIT_NO_COMMAND


_CONTEXT_TOKENS = 4096
"""Assumed where only the model's download would say it."""


def check_serve(graph: Graph) -> None:
    """Check a graph as `penstock serve` does; a checkpoint only if it is on this machine.

    Raises:
        ConfigError: the first thing that is refused.
    """
    roles = runnable_roles(graph)
    check_model(graph)
    check_nodes(graph, roles)
    expect_one_machine(roles)
    _check_files(graph)
    if cards := check_checkpoint(graph, roles):
        expect_same_blocks(cards)
        if graph.planner is not None:
            capacities_of(graph, roles, open_checkpoint(graph).path)
    _check_engines(graph, find_checkpoint(graph))


def find_checkpoint(graph: Graph) -> Checkpoint | None:
    """Open the model's configuration, if the model is on this machine; a hub name is not downloaded."""
    model = str(MODEL_DIR) if graph.model == DEMO_MODEL else graph.model
    return Checkpoint.open(model) if Path(model).expanduser().is_dir() else None


def _check_files(graph: Graph) -> None:
    """Read the keys and certificates that the graph names.

    Raises:
        ConfigError: one cannot be read, or they do not belong together.
    """
    if graph.frontend.tls is not None:
        ServerTls(graph.frontend.tls)
    read_tenants(graph.frontend.api_key_file)
    PlaneTls.of(graph.runtime.tls)
    for index, region in enumerate(graph.regions):
        check_files(region, f"regions.{index}")


def _check_engines(graph: Graph, checkpoint: Checkpoint | None) -> None:
    """Describe how a worker of each role would be started, without starting it.

    Raises:
        ConfigError: an engine does not take its arguments, or cannot have a setting of the graph.
    """
    if checkpoint is None and graph.context_length is None:
        graph = graph.model_copy(update={"context_length": _CONTEXT_TOKENS})
    for name, role in graph.roles.present().items():
        try:
            spec = engine_spec(graph, role, checkpoint, adapters=role.adapters_of(0))
            describe_launch(role.engine, spec, SymbolicHost())
        except ConfigError as error:
            raise ConfigError(f"roles.{name}: {error.message}") from error


_ARENA = "<memory of the host's workers>"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedWorker:
    """What one worker would be started with.

    Attributes:
        devices: indices of its GPUs on its machine.
        call: what takes `arguments`, in the names of `version`.
        environment: variables set for the engine's processes.
    """

    name: str
    role: str
    engine: str
    hardware: str
    devices: Sequence[int]
    adapters: Sequence[str]
    call: str
    version: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]


def render(graph: Graph, *, as_json: bool = False) -> str:
    """Format what the graph's workers would be started with: as YAML by role, or as JSON by worker.

    Raises:
        ConfigError: there is no such model, or an engine cannot have a setting of the graph.
    """
    check_model(graph)
    graph = Graph.model_validate_json(graph.model_dump_json())  # as it reaches a worker
    checkpoint = find_checkpoint(graph)
    workers = render_workers(graph, checkpoint)
    notes = list(_notes(graph, checkpoint))
    if not as_json:
        return _text(graph, workers, notes)
    document = {
        "name": graph.name,
        "model": graph.model,
        "block_size": graph.block_size,
        "notes": notes,
        "workers": [asdict(worker) for worker in workers],
    }
    return json.dumps(document, indent=1) + "\n"


def render_workers(graph: Graph, checkpoint: Checkpoint | None) -> list[RenderedWorker]:
    """Describe the start of each worker.

    Args:
        graph: the deployment.
        checkpoint: its model; None where it is not on this machine.

    Raises:
        ConfigError: an engine cannot have a setting of the graph, or there are more workers than a router can know.
    """
    roles = graph.roles.present()
    if sum(role.replicas for role in roles.values()) > graph.router.workers_max:
        check_counts(graph.roles, graph.router.workers_max)
    room = WorkerCapacity(Devices(None), ProcessCores(None), graph.router.workers_max)
    extents = HostExtents(roles)
    rendered = []
    for place in declared_workers(roles):
        role = roles[place.home]
        worker = PoolWorker(home=place.home, index=place.index, role=place.role)
        room.give(worker, role)
        adapters = role.adapters_of(worker.index)
        spec = engine_spec(
            graph,
            role,
            checkpoint,
            index=worker.index,
            device_index=worker.devices[0] if worker.devices else 0,
            adapters=adapters,
            host_part=extents.part(worker.home, worker.index, _ARENA),
        )
        try:
            launch = describe_launch(role.engine, spec, SymbolicHost())
        except ConfigError as error:
            raise ConfigError(f"roles.{place.home}: {error.message}") from error
        rendered.append(
            RenderedWorker(
                name=worker.name,
                role=str(worker.role),
                engine=role.engine,
                hardware=role.hardware,
                devices=worker.devices,
                adapters=adapters,
                call=launch.call,
                version=launch.version,
                arguments=launch.arguments,
                environment=launch.environment,
            )
        )
    return rendered


def _notes(graph: Graph, checkpoint: Checkpoint | None) -> Iterator[str]:
    """Say in one line each why a start would differ, or not be."""
    try:
        check_serve(graph)
    except ConfigError as error:
        yield f"penstock serve refuses it: {error.message}"
    roles = graph.roles.present()
    if checkpoint is None:
        unset = [] if graph.context_length else ["context_length"]
        if Role.PREFILL in roles and roles[Role.PREFILL].max_batch_tokens is None:
            unset.append("roles.prefill.max_batch_tokens")
        read = f", and reads {' and '.join(unset)} from its config.json" if unset else ""
        yield f"model: {graph.model} is not on this machine: a start gives engines the directory of its download{read}"
    for name, role in roles.items():
        if not role.replicas:
            yield f"roles.{name}: has no workers at the start"
        if graph.worker.own_cores and computes_here(role):
            yield f"roles.{name}: worker.own_cores: a start gives each worker's engine a core, as device cpu:CORE"


def _text(graph: Graph, workers: Sequence[RenderedWorker], notes: Sequence[str]) -> str:
    by_role = {
        str(role): [worker for worker in workers if worker.role == role] for role in graph.roles.present()
    }
    sections = {role: _section(own) for role, own in by_role.items() if own}
    comments = "".join(f"# {note}\n" for note in notes)
    return comments + yaml.dump(sections, Dumper=_Dumper, sort_keys=False, width=10_000)


def _section(workers: Sequence[RenderedWorker]) -> dict[str, Any]:
    """Write once what is equal for all workers of a role, and the rest by worker."""
    first, *_ = workers
    section: dict[str, Any] = {
        "engine": first.engine,
        "hardware": first.hardware,
        "call": first.call,
        "version": first.version,
    }
    each = {
        worker.name: {"devices": list(worker.devices), "adapters": list(worker.adapters)}
        for worker in workers
    }
    for kind in ("arguments", "environment"):
        values = [getattr(worker, kind) for worker in workers]
        common = {
            name: value
            for name, value in values[0].items()
            if all(name in other and other[name] == value for other in values)
        }
        section[kind] = common
        for worker, own in zip(workers, values, strict=True):
            each[worker.name][kind] = {name: value for name, value in own.items() if name not in common}
    section["workers"] = {
        name: {kind: value for kind, value in own.items() if value} for name, own in each.items()
    }
    return {name: value for name, value in section.items() if value}


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line, and shares nothing by anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _flow(dumper: yaml.SafeDumper, items: Sequence[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(list, _flow)
_Dumper.add_representer(tuple, _flow)
