"""What `penstock serve` refuses of a graph before anything starts."""

from penstock.deploy.card import check_checkpoint, check_model, open_checkpoint
from penstock.deploy.supervisor.local_part import check_nodes, expect_same_blocks, runnable_roles
from penstock.deploy.supervisor.planning import capacities_of
from penstock.deploy.supervisor.resources.devices import expect_one_machine
from penstock.graph import Graph


def check_serve(graph: Graph) -> None:
    """Check a graph as `penstock serve` does; a checkpoint only if it is on this machine.

    Raises:
        ConfigError: the first thing that is refused.
    """
    roles = runnable_roles(graph)
    check_model(graph)
    check_nodes(graph, roles)
    expect_one_machine(roles)
    if cards := check_checkpoint(graph, roles):
        expect_same_blocks(cards)
        if graph.planner is not None:
            capacities_of(graph, roles, open_checkpoint(graph).path)
