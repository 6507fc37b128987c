"""What `penstock serve` refuses of a graph before anything starts."""

from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.demo import MODEL_DIR
from penstock.deploy.card import check_checkpoint, check_model, open_checkpoint
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.deploy.supervisor.links.links import check_files
from penstock.deploy.supervisor.local_part import check_nodes, expect_same_blocks, runnable_roles
from penstock.deploy.supervisor.planning import capacities_of
from penstock.deploy.supervisor.resources.devices import expect_one_machine
from penstock.engine.launch import SymbolicHost
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.registry import describe_launch
from penstock.frontend.http.server import ServerTls
from penstock.frontend.limits.keys import read_tenants
from penstock.graph import DEMO_MODEL, Graph
from penstock.runtime.tls import PlaneTls

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
