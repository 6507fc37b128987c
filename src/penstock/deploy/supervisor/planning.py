"""Makes the planner of a deployment on this machine."""

from collections.abc import Callable
from pathlib import Path

from penstock.core.types.instances import Role
from penstock.graph import Graph, RoleSpec, Slo
from penstock.graph.capacities import is_predicted, make_capacity
from penstock.planner.estimate import slo as estimate
from penstock.planner.explain.record import DecisionRecord
from penstock.planner.observe.observation import Observation
from penstock.planner.observe.stream import ObservationStream
from penstock.planner.planner import Planner
from penstock.seams import ScalingConnector

Say = Callable[[str, str, str], None]
_NAME = "planner"


def make_planner(
    graph: Graph,
    roles: dict[Role, RoleSpec],
    connector: ScalingConnector,
    observations: ObservationStream,
    *,
    model_dir: Path,
    say: Say,
) -> Planner | None:
    """Make the planner that the graph describes; None if it describes none.

    Args:
        graph: the deployment.
        roles: its roles.
        connector: changes its workers.
        observations: what its processes see.
        model_dir: the checkpoint's directory.
        say: called with (name, state, detail) for what a user should know.

    Raises:
        ConfigError: step times of a role cannot be predicted.
    """
    config = graph.planner
    if config is None:
        return None
    capacities = [
        make_capacity(role, spec, model_dir=model_dir, block_size=graph.block_size, budget=config.budget)
        for role, spec in roles.items()
    ]
    slo = graph.slo or Slo()
    bounds = ", ".join(
        f"{least} to {most} {role}" for role in roles for least, most in (config.bounds(role),)
    )
    dry = ", dry run" if config.dry_run else ""
    say(
        _NAME,
        "starting",
        f"{bounds} for TTFT {slo.ttft_s * 1e3:g} ms and ITL {slo.itl_s * 1e3:g} ms of {slo.percentile:g} % of requests{dry}",
    )
    for role, spec in roles.items():
        if is_predicted(spec):
            say(
                _NAME,
                "warning",
                f"roles.{role} has no profile: step times are predicted from the data sheet of {spec.hardware} and corrected by"
                " measured ones; penstock profile measures them",
            )

    async def observe(seconds: float) -> Observation:
        return observations.observe(seconds)

    def tell(record: DecisionRecord) -> None:
        if record.is_change:
            say(_NAME, "would" if record.is_dry else "scales", record.explain().removeprefix("would: "))

    return Planner(
        connector,
        observe,
        config=config,
        slo=estimate.Slo(ttft_s=slo.ttft_s, itl_s=slo.itl_s, percentile=slo.percentile),
        capacities=capacities,
        on_record=tell,
    )
