"""A fleet in three regions with its routers in one: conversations stay where their KV is, and outlive a region."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penstock.core.ids import RequestId
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import PackedHashes, PackedTokens
from penstock.graph import Overrides, load
from penstock.router.candidates import Route, ScoredCandidates
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.router import Router
from penstock.sim.deployment import SALT, Deployment, plan_deployment
from penstock.sim.loop.loop import run
from penstock.sim.report.report import latencies_s
from penstock.sim.simulate import Recording, simulate
from penstock.sim.workload.prompt import Prompt
from penstock.sim.workload.workload import Session, Turn, WorkloadConfig, make_sessions
from penstock.sim.world.cluster import SimCluster

GRAPH = Path(__file__).parents[3] / "examples" / "graphs" / "8b-h100-three-regions.yaml"
REGIONS = ("eu", "us", "asia")
pytestmark = pytest.mark.slow


def planned(*settings: str) -> Deployment:
    return plan_deployment(load(GRAPH, Overrides(settings)), beside=GRAPH.parent)


DEPLOYMENT = planned()


@dataclass
class Chosen:
    """Where a request went, and how many blocks of its prefix each region had."""

    region: str
    overlaps: dict[str, int]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Chosen]:
    """Have every decision written down."""
    seen: list[Chosen] = []
    take = Router.take

    def written(router: Router, candidates: ScoredCandidates, *, again: bool) -> Route:
        context = candidates.context
        overlaps = dict.fromkeys(REGIONS, 0)
        for slot in context.eligible.nonzero()[0]:
            region = router.fleet.slots.at(slot).instance.region
            overlaps[region] = max(overlaps[region], int(context.overlap_blocks[slot]))
        seen.append(Chosen(router.fleet.slots.at(candidates.choice.slot).instance.region, overlaps))
        return take(router, candidates, again=again)

    monkeypatch.setattr(Router, "take", written)
    return seen


def chats(requests: int, rate_per_s: float, input_tokens: int = 2000) -> list[Session]:
    """Make conversations of four turns that remember all before; `rate_per_s` conversations."""
    config = WorkloadConfig(
        requests=requests,
        rate_per_s=rate_per_s,
        input_tokens=input_tokens,
        output_tokens=200,
        length_sigma=0.5,
        turns=4,
        think_s=10,
    )
    return list(make_sessions(config, random.Random(1)))


@pytest.mark.parametrize("home", REGIONS)
def test_follow_ups_go_to_the_region_that_holds_their_kv(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    seen = watch(monkeypatch)
    recording = simulate(planned(f"router.location={{region: {home}}}"), chats(1200, 4.0), seed=1)
    assert not recording.failed
    follow_ups = [chosen for chosen in seen if max(chosen.overlaps.values())]
    assert len(follow_ups) > 600
    away = [c for c in follow_ups if c.overlaps[c.region] < max(c.overlaps.values())]
    assert len(away) <= 0.05 * len(follow_ups)
    regions = {chosen.region for chosen in seen}
    assert home in regions
    assert len(regions) > 1, "first turns go where there is room"


def test_near_workers_come_first_and_far_ones_take_what_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    for rate_per_s in (0.5, 25.0):
        seen = watch(monkeypatch)
        simulate(DEPLOYMENT, chats(600, rate_per_s, input_tokens=6000), seed=1)
        shares.append(np.mean([chosen.region == "eu" for chosen in seen]))
        monkeypatch.undo()
    idle, busy = shares
    assert idle > 0.95
    assert 0.3 < busy < 0.9


def test_a_far_worker_answers_later_by_the_way_there_and_back() -> None:
    def ttft_s(region: str) -> float:
        where = f"roles.aggregated.locations=[{{region: {region}}}]"
        deployment = planned(where, "roles.aggregated.replicas=1")
        turn = Turn(1000, 2)
        recording: Recording = simulate(deployment, [Session(0.0, (turn,), Prompt(1))], seed=1)
        return float(latencies_s(recording)[0][0])

    near_s = ttft_s("eu")
    assert ttft_s("us") - near_s == pytest.approx(2 * 0.04, abs=0.005)
    assert ttft_s("asia") - near_s == pytest.approx(2 * 0.09, abs=0.005)


Loss = Callable[[SimCluster, list[str]], Awaitable[None]]


async def die(cluster: SimCluster, names: list[str]) -> None:
    for name in names:
        cluster.settle(name)
        cluster.kill(name)


async def be_cut_off(cluster: SimCluster, names: list[str]) -> None:
    for name in names:
        cluster.settle(name)
        for host in cluster.frontend_hosts:
            cluster.network.cut(cluster.workers[name].host, host)


@pytest.mark.parametrize("loss", [die, be_cut_off])
def test_the_loss_of_a_region_costs_no_answer(loss: Loss) -> None:
    """200 answers are under way when the routers' own region goes; all end elsewhere, each with all its tokens."""
    spec_streams: dict[RequestId, Prompt] = {}
    regions: dict[bool, set[str]] = {False: set(), True: set()}

    async def ask(dispatcher: Dispatcher, number: int) -> int:
        request_id = RequestId(f"r{number}")
        prompt = spec_streams[request_id] = Prompt(number)
        size = DEPLOYMENT.graph.block_size
        request = Request(
            request_id=request_id,
            model=DEPLOYMENT.graph.model,
            token_ids=PackedTokens(bytes(4 * 2000)),
            sampling=SamplingParams(max_tokens=800, ignore_eos=True),
            block_hashes=PackedHashes(prompt.block_hashes(size, 0, 2000 // size).tobytes()),
            salt=SALT,
        )
        async with dispatcher.open(request) as stream:
            async for _ in stream:
                pass
        return stream.output_tokens

    async def main(rng: random.Random) -> None:
        async with SimCluster(DEPLOYMENT.cluster_spec(spec_streams), rng) as cluster:
            for number in range(9):
                await cluster.start(f"worker-{number}")
            (dispatcher,) = cluster.dispatchers
            await dispatcher.serving()
            await asyncio.sleep(1.0)
            names = [view.name for view in dispatcher.workers() if view.region == "eu"]
            assert len(names) == 3
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(ask(dispatcher, number)) for number in range(200)]
                await asyncio.sleep(2.0)
                regions[False] = {view.region for view in dispatcher.workers() if view.open_requests}
                await loss(cluster, names)
                await asyncio.sleep(30.0)
                regions[True] = {view.region for view in dispatcher.workers() if view.open_requests}
                asked += [group.create_task(ask(dispatcher, number)) for number in range(200, 220)]
            assert [task.result() for task in asked] == [800] * 220
            dispatcher.check()

    run(main, 3)
    assert "eu" in regions[False]
    assert "eu" not in regions[True]


def test_workers_show_where_they_are() -> None:
    async def main(rng: random.Random) -> None:
        async with SimCluster(DEPLOYMENT.cluster_spec({}), rng) as cluster:
            for number in range(3):
                await cluster.start(f"worker-{number}")
            (dispatcher,) = cluster.dispatchers
            await dispatcher.serving()
            await asyncio.sleep(1.0)
            shown = [(view.host, view.rack, view.zone, view.region) for view in dispatcher.workers()]
            assert sorted(shown, key=lambda where: REGIONS.index(where[3])) == [
                ("worker-0-1", "", "eu-1", "eu"), ("worker-1-2", "", "us-1", "us"), ("worker-2-3", "", "asia-1", "asia")
            ]  # fmt: skip
            assert (
                cluster.network.path("worker-0-1", "frontend-1") == DEPLOYMENT.graph.router.topology.same_rack
            )
            assert cluster.network.path("worker-1-2", "worker-0-1").latency_s == 0.04

    run(main, 3)
