"""A worker that is slower than it says, on virtual time: the router finds out how slow, soon, and sends it less."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.core.ids import RequestId
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import PackedHashes, PackedTokens
from penstock.graph import load
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.cluster import SimCluster
from penstock.sim.deployment import SALT, plan_deployment
from penstock.sim.loop import run
from penstock.sim.workload import SimPrompt
from tests.support.scenes import scenes

GRAPH = Path(__file__).parents[3] / "examples" / "graphs" / "8b-h100-x8.yaml"
DEPLOYMENT = plan_deployment(load(GRAPH), beside=GRAPH.parent)
pytestmark = pytest.mark.slow


class Crowd:
    """So many clients that send one request after the other."""

    def __init__(
        self, dispatcher: Dispatcher, streams: dict[RequestId, SimPrompt], rng: random.Random
    ) -> None:
        self._dispatcher = dispatcher
        self._streams = streams
        self._rng = rng
        self._sent = 0

    async def send_for_ever(self) -> None:
        while True:
            self._sent += 1
            request_id = RequestId(f"r{self._sent}")
            prompt = self._streams[request_id] = SimPrompt(self._rng.getrandbits(63))
            tokens, size = self._rng.randrange(100, 1000), DEPLOYMENT.graph.block_size
            request = Request(
                request_id=request_id,
                model=DEPLOYMENT.graph.model,
                token_ids=PackedTokens(bytes(4 * tokens)),
                sampling=SamplingParams(max_tokens=self._rng.randrange(50, 500), ignore_eos=True),
                block_hashes=PackedHashes(prompt.block_hashes(size, 0, tokens // size).tobytes()),
                salt=SALT,
            )
            async with self._dispatcher.open(request) as stream:
                async for _ in stream:
                    pass
            del self._streams[request_id]


Scene = Callable[[SimCluster, Dispatcher], Awaitable[None]]


def run_scenario(scene: Scene, clients: int) -> None:
    """Have clients keep four workers busy while a scenario runs."""

    async def main(rng: random.Random) -> None:
        streams: dict[RequestId, SimPrompt] = {}
        async with SimCluster(DEPLOYMENT.cluster_spec(streams), rng) as cluster:
            for number in range(4):
                await cluster.start(f"worker-{number}")
            (dispatcher,) = cluster.dispatchers
            await dispatcher.serving()
            async with asyncio.TaskGroup() as group:
                crowd = Crowd(dispatcher, streams, rng)
                busy = [group.create_task(crowd.send_for_ever()) for _ in range(clients)]
                await scene(cluster, dispatcher)
                for client in busy:
                    client.cancel()

    run(main, 7)


scenario = scenes(run_scenario, 2)


def factors(dispatcher: Dispatcher) -> dict[str, float | None]:
    return {view.name: view.price_factor for view in dispatcher.workers()}


@scenario(clients=200)
async def test_a_worker_that_turns_twice_as_slow_is_found_out_soon_and_its_factor_does_not_swing(
    cluster, dispatcher
):
    await asyncio.sleep(30.0)
    before = factors(dispatcher)["worker-0"]
    assert before == pytest.approx(1.0, abs=0.1)
    cluster.workers["worker-0"].pace.factor = 2.0
    await asyncio.sleep(30.0)
    assert factors(dispatcher)["worker-0"] == pytest.approx(2.0 * before, rel=0.1)
    for _ in range(30):
        await asyncio.sleep(1.0)
        assert factors(dispatcher)["worker-0"] == pytest.approx(2.0, rel=0.15), "no swinging"
    after = factors(dispatcher)
    assert [after[f"worker-{n}"] for n in (1, 2, 3)] == pytest.approx([1.0] * 3, abs=0.1), "as they say"


@scenario(clients=32)
async def test_a_worker_that_got_nothing_for_being_slow_is_tried_again(cluster, dispatcher):
    worker = cluster.workers["worker-0"]
    worker.pace.factor = 4.0
    await asyncio.sleep(60.0)
    assert factors(dispatcher)["worker-0"] in (1.0, pytest.approx(4.0, rel=0.3))
    worker.pace.factor = 1.0
    await asyncio.sleep(60.0)
    tokens = worker.engine.load().generated_tokens
    await asyncio.sleep(30.0)
    assert worker.engine.load().generated_tokens > tokens + 1000
    assert factors(dispatcher)["worker-0"] == pytest.approx(1.0, abs=0.1)
