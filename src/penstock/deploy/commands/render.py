"""`penstock graph render`: prints what each worker of a graph would be started with.

The arguments come from the functions that start the engines, on a host that names what only a start can find.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.card import check_model
from penstock.deploy.commands.check import check_serve, find_checkpoint
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.deploy.supervisor.resources.devices import Devices
from penstock.deploy.supervisor.resources.host_arena import HostExtents
from penstock.deploy.supervisor.resources.process_cores import ProcessCores, computes_here
from penstock.deploy.supervisor.scaling.pool_worker import PoolWorker
from penstock.deploy.supervisor.scaling.room import Room
from penstock.deploy.supervisor.scaling.scale_file import declared_workers
from penstock.engine.launch import SymbolicHost
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.registry import describe_launch
from penstock.graph import Graph
from penstock.graph.partners import check_counts

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
    room = Room(Devices(None), ProcessCores(None), graph.router.workers_max)
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
