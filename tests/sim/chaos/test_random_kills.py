"""Workers that die every few seconds while streams run for much longer: each stream is whole, and no prompt is blamed."""

import asyncio
import random

import pytest

from penstock.core.ids import RequestId
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.sim.chaos import StreamChecker
from penstock.sim.chaos_trial import Trial, small_spec
from penstock.sim.cluster import SimCluster
from penstock.sim.engine_timing import reference
from penstock.sim.loop import run
from tests.support.chaos import seeds

WORKERS, STREAMS, TOKENS = 6, 24, 100
EVERY_S = 0.4
"""Between two deaths; a stream of 100 tokens takes ten times as long on an engine that nothing happens to."""


def request_of(number: int, again: str = "") -> tuple[Request, list[int]]:
    prompt = [number, *range(4 + 2 * number % 40)]
    request = Request(
        request_id=RequestId(f"stream-{number}{again}"),
        model="trial",
        token_ids=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=TOKENS),
        salt=b"trial",
    )
    return request, reference(prompt, TOKENS)


async def read(cluster: SimCluster, number: int, again: str = "") -> int:
    """Read one stream to its end and compare it; give how often it moved."""
    request, expected = request_of(number, again)
    loop = asyncio.get_running_loop()
    witness = StreamChecker(request, expected, loop.time())
    async with cluster.dispatchers[number % len(cluster.dispatchers)].open(request) as stream:
        async for delta in stream:
            witness.see(delta)
    witness.end(None, loop.time())
    return stream.migrations


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_streams_outlive_many_workers_and_no_prompt_is_blamed(seed: int) -> None:
    async def main(rng: random.Random) -> None:
        deaths = 0
        async with SimCluster(small_spec(Trial(workers=WORKERS)), rng) as cluster:
            for number in range(WORKERS):
                await cluster.start(f"worker-{number}")
            for dispatcher in cluster.dispatchers:
                await dispatcher.serving()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(read(cluster, number)) for number in range(STREAMS)]
                while not all(task.done() for task in tasks):
                    await asyncio.sleep(EVERY_S)
                    deaths += 1
                    cluster.kill(rng.choice(list(cluster.workers)))
                    await cluster.start(f"replacement-{deaths}")
            moved = [task.result() for task in tasks]
            assert deaths > 8
            assert max(moved) > 2
            assert sum(moved) > STREAMS
            await asyncio.sleep(3.0)
            for number in range(0, STREAMS, 6):
                await read(cluster, number, " again")

    run(main, seed)
