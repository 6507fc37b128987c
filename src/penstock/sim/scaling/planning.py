"""The planner that a simulated graph describes."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.graph import Slo
from penstock.graph.capacities import make_capacity
from penstock.planner.decide.capacity import Capacity
from penstock.planner.estimate import slo as estimate
from penstock.planner.planner import Planner
from penstock.sim.deployment import Deployment
from penstock.sim.role_group import RoleGroup
from penstock.sim.scaling.scaled_cluster import ScaledCluster

Controller = Callable[[ScaledCluster], Awaitable[None]]
"""Scales a simulated deployment until it is cancelled."""


def planner_of(deployment: Deployment) -> Controller | None:
    """Give the planner of a deployment's graph; None where it has none.

    Raises:
        ConfigError: step times of a role cannot be predicted, or the planner cannot scale the roles.
    """
    config = deployment.graph.planner
    if config is None:
        return None
    capacities = [_capacity(deployment, role_group) for role_group in deployment.role_groups]
    given = deployment.graph.slo or Slo()
    slo = estimate.Slo(ttft_s=given.ttft_s, itl_s=given.itl_s, percentile=given.percentile)

    async def scale(scaled: ScaledCluster) -> None:
        planner = Planner(
            scaled.connector,
            scaled.observe,
            config=config,
            slo=slo,
            capacities=capacities,
            on_record=scaled.keep,
        )
        await planner.run()

    return scale


def _capacity(deployment: Deployment, role_group: RoleGroup) -> Capacity:
    """Predict a role's workers as the router does, from the graph: `--engine-profile` is of the engines alone."""
    graph = deployment.graph
    # What a simulated engine is: its steps have the scheduler's limits, and its KV is known.
    spec = role_group.spec.model_copy(update={"engine": "paged", "kv_blocks": role_group.num_blocks})
    return make_capacity(
        role_group.role,
        spec,
        model_dir=Path(),
        block_size=graph.block_size,
        budget=graph.planner.budget if graph.planner else None,
        shape=deployment.shape,
    )
