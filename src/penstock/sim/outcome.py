"""Simulates a graph with a workload in one call, for programs."""

from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

from penstock.graph import Graph
from penstock.sim.deployment import plan_deployment
from penstock.sim.report.report import make_report
from penstock.sim.report.summary import Report
from penstock.sim.scaling.scaled_cluster import START_S
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
    start_s: float = START_S,
) -> Report:
    """Simulate a graph with a workload; may be called repeatedly in one process.

    Args:
        graph: roles in any mix.
        sessions: sorted by time.
        beside: second base of the model's relative path.
        seed: random seed.
        engine_profile: profile that all simulated engines use, while the router keeps the graph's estimates.
        exact: engines run every step.
        start_s: seconds that a worker takes to start, where the graph has a planner.

    Returns:
        The report of `penstock simulate --json`, without `inputs`.

    Raises:
        ConfigError: the graph or workload cannot be simulated; the text has the arithmetic.
    """
    workload = list(sessions)
    deployment = plan_deployment(graph, beside=beside, engine_profile=engine_profile, exact=exact)
    deployment.check(workload)
    started_s = perf_counter()
    recording = simulate(deployment, workload, seed=seed, start_s=start_s)
    return make_report(recording, deployment, graph.slo, wall_s=perf_counter() - started_s)
