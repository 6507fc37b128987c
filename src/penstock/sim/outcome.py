"""A graph played with a workload in one call: for programs that try many."""

from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

from penstock.graph import Graph
from penstock.sim.deployment import plan_deployment
from penstock.sim.report.report import make_report
from penstock.sim.report.summary import Report
from penstock.sim.simulate import simulate
from penstock.sim.workload.workload import Session


def simulate_graph(
    graph: Graph,
    sessions: Iterable[Session],
    *,
    beside: Path = Path(),
    seed: int = 0,
    engine_profile: Path | None = None,
    exact: bool = False,
) -> Report:
    """Play a workload on a graph's workers; any number of times in one process.

    Args:
        graph: roles in any mix.
        sessions: in order of time.
        beside: the directory that a model's relative path may start from.
        seed: for all that is drawn.
        engine_profile: what all simulated engines run on instead of what the router expects of them.
        exact: have engines take every step.

    Returns:
        What `penstock simulate --json` writes, without `inputs`.

    Raises:
        ConfigError: the graph or the workload cannot be simulated, with the arithmetic.
    """
    played = list(sessions)
    deployment = plan_deployment(graph, beside=beside, engine_profile=engine_profile, exact=exact)
    deployment.check(played)
    started_s = perf_counter()
    recording = simulate(deployment, played, seed=seed)
    return make_report(recording, deployment, graph.slo, wall_s=perf_counter() - started_s)
