"""Several routers, simulated: as good as one also where requests come together, and whole where one of them vanishes."""

import asyncio
import random
from pathlib import Path

import pytest

from penstock.graph import Overrides, load
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.chaos_trial import _request, small_spec
from penstock.sim.cluster import SimCluster
from penstock.sim.deployment import plan_deployment
from penstock.sim.loop import run
from penstock.sim.report import latencies_s
from penstock.sim.simulate import simulate
from penstock.sim.workload import SimPrompt, SimSession, Turn

GRAPH = Path(__file__).parents[3] / "examples" / "graphs" / "8b-h100-x8.yaml"
BUNCH, BUNCHES, PAUSE_S = 8, 12, 3.0


def mean_ttft_s(*settings: str) -> float:
    """Play bunches of requests that come at the same moment, as a trace with coarse times has them."""
    rng = random.Random(7)
    sessions = [
        SimSession(
            number // BUNCH * PAUSE_S,
            (Turn(int(rng.lognormvariate(9, 0.8)), 40, 0.0),),
            SimPrompt(own=number),
        )
        for number in range(BUNCH * BUNCHES)
    ]
    deployment = plan_deployment(load(GRAPH, Overrides(settings)), beside=GRAPH.parent)
    ttft_s, _, _ = latencies_s(simulate(deployment, sessions, seed=1))
    assert len(ttft_s) == len(sessions)
    return float(ttft_s.mean())


@pytest.mark.slow
def test_four_routers_are_as_good_as_one_where_requests_come_together():
    one = mean_ttft_s()
    assert mean_ttft_s("frontend.processes=4") < 1.05 * one
    unaware = mean_ttft_s("frontend.processes=4", "router.retries.stale_routes_max=0")
    assert unaware > 1.15 * one, "or the bunches are none"


def test_what_a_vanished_frontend_had_sent_is_nobodys_once_its_workers_lose_patience():
    async def main(rng: random.Random) -> None:
        async with SimCluster(small_spec(), rng) as cluster:
            await cluster.start("worker-0")
            here, there = cluster.dispatchers
            for dispatcher in (here, there):
                await dispatcher.serving()
            await asyncio.sleep(0.1)
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(read(there))
                await asyncio.sleep(0.05)
                assert told(here) == (1, 1)
                cluster.network.freeze("frontend-2")
                await asyncio.sleep(cluster.spec.plane.heartbeat_timeout_s - 0.05)
                assert told(here) == (1, 1), "it may only be slow"
                await asyncio.sleep(0.15)
                assert told(here) == (0, 0)
                reading.cancel()
            cluster.network.thaw("frontend-2")

    run(main, 1)


async def read(dispatcher: Dispatcher) -> None:
    async with dispatcher.open(_request("r", list(range(20)), 100)) as stream:
        async for _ in stream:
            pass


def told(dispatcher: Dispatcher) -> tuple[int, int]:
    """Give the other frontends and their requests, as the worker told this one."""
    (view,) = dispatcher.workers()
    assert view.load is not None
    return view.load["peers"], view.load["peer_requests"]
