"""One strategy on one workload, in virtual time."""

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.planner.baselines import Strategy
from benchmarks.planner.timeline import timeline
from benchmarks.planner.workload import Workload
from benchmarks.planner.world.cluster import Cluster, Fleet
from penstock.core.types.instances import Role
from penstock.planner.demand import SloTargets
from penstock.sim.loop import run_virtual


@dataclass(frozen=True, slots=True)
class Result:
    """What a strategy made of a workload.

    attainment:  share of requests within both targets
    gpu_hours:   of all workers until the last arrival, those that start and drain included
    changes:     times that the number of workers began to rise after it fell, or to fall after it rose; of one role or of all, which is more
    timeline:    by name, a value of each minute, or of each five in a longer run
    """

    attainment: float
    ttft_share: float
    itl_share: float
    gpu_hours: float
    failed: int
    changes: int
    flips: int
    cached_share: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    cpu_s: float
    history: list[tuple[float, int, dict[Role, int]]]
    timeline: dict[str, list[float]]


def play(
    strategy: Strategy,
    workload: Workload,
    fleet: Fleet,
    slo: SloTargets,
    *,
    replicas: Mapping[Role, int],
    start_s: float,
    can_flip: bool = True,
) -> Result:
    """Serve a workload, and see how it went."""
    began_s = time.process_time()
    cluster = Cluster(
        fleet=fleet, workload=workload, replicas=dict(replicas), start_s=start_s, can_flip=can_flip
    )
    run_virtual(_serve(strategy, cluster))
    ttft_s, itl_s = np.asarray(cluster.tally.ttft_s), np.asarray(cluster.tally.itl_s)
    is_early, is_even = ttft_s <= slo.ttft_s, itl_s <= slo.itl_s
    return Result(
        attainment=float((is_early & is_even).mean()),
        ttft_share=float(is_early.mean()),
        itl_share=float(is_even.mean()),
        gpu_hours=cluster.gpu_s / 3600,
        failed=workload.requests - cluster.tally.finished,
        changes=_changes([counts for _, _, counts in cluster.history]),
        flips=cluster.flips,
        cached_share=cluster.tally.cached_tokens / max(1, int(workload.input_tokens.sum())),
        ttft_p50_s=float(np.nanpercentile(ttft_s, 50)),
        ttft_p99_s=float(np.nanpercentile(ttft_s, 99)),
        itl_p50_s=float(np.nanpercentile(itl_s, 50)),
        itl_p99_s=float(np.nanpercentile(itl_s, 99)),
        cpu_s=time.process_time() - began_s,
        history=cluster.history,
        timeline=timeline(workload, is_early & is_even, cluster.history),
    )


async def _serve(strategy: Strategy, cluster: Cluster) -> None:
    task = asyncio.create_task(strategy.run(cluster))
    try:
        await cluster.serve()
    finally:
        if task.done():
            task.result()
        task.cancel()


def _changes(history: list[dict[Role, int]]) -> int:
    roles = {role for counts in history for role in counts}
    of_one = [_turns([counts.get(role, 0) for counts in history]) for role in roles]
    return max(_turns([sum(counts.values()) for counts in history]), *of_one)


def _turns(counts: list[int]) -> int:
    """Count the changes of direction."""
    steps = [after - before for before, after in itertools.pairwise(counts) if after != before]
    return sum((one > 0) != (other > 0) for one, other in itertools.pairwise(steps))
