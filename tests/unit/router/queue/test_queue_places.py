"""Requests that wait at the router as every place in the workers' batches is taken: short prompts with long answers."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from penstock.core.types.requests import Request
from penstock.engine.batched import BatchedEngine
from penstock.engine.mock.engine import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.router.config import QueueConfig, RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.loop.loop import run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import PRICES, TIMING, tiny_request
from tests.support.scenes import scenes

WORKERS, PLACES, TOKENS = 2, 4, 200
ANSWER_S = TOKENS * 0.01
"""What one of these takes in a batch."""


class Crowd:
    """Requests and when each got its first token, by name; `queued` is how many waited in the worker where most did, every 20 ms."""

    def __init__(self, cluster: MemoryCluster, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.first_s: dict[str, float] = {}
        self.queued: list[int] = []
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()

    @property
    def num_queued(self) -> int:
        return self.dispatcher.queued()[0]

    async def ask(self, name: str, *, tenant: str = "", priority: int = 0) -> None:
        request: Request = tiny_request(name, length=8, max_tokens=TOKENS, seed=len(self.first_s))
        request = msgspec.structs.replace(request, tenant=tenant, priority=priority)
        opened_s = self._loop.time()
        async with self.dispatcher.open(request) as stream:
            async for _ in stream:
                self.first_s.setdefault(name, self._loop.time() - opened_s)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            loads = [self._cluster.engine(name).load() for name in self._cluster.names]
            self.queued.append(max(load.waiting_requests for load in loads))
            self.dispatcher.check()


def run_scenario(scene: Callable[[Crowd, asyncio.TaskGroup], Awaitable[None]], **queue: object) -> None:
    async def main() -> None:
        config = RouterConfig(queue=QueueConfig(**queue))
        async with MemoryCluster() as cluster, cluster.dispatcher(config) as dispatcher:
            for number in range(WORKERS):
                await cluster.start(f"w{number}", engine_of(PLACES), prices=PRICES)
            await asyncio.sleep(0.1)
            crowd = Crowd(cluster, dispatcher)
            watching = asyncio.ensure_future(crowd.watch())
            async with asyncio.TaskGroup() as group:
                await scene(crowd, group)
            watching.cancel()
            assert crowd.num_queued == 0

    run_virtual(main())


scenario = scenes(run_scenario, 2)


def engine_of(places: int) -> BatchedEngine:
    shape = RunnerInfo(num_blocks=2000, block_size=4, context_length=400, vocab_size=500)
    config = MockConfig(timing=TIMING, answer_tokens=4 * TOKENS)
    return mock_engine(shape, config, SchedulerConfig(max_batch_tokens=64, max_running_requests=places))


@scenario()
async def test_what_has_no_place_waits_at_the_router_and_no_place_is_empty_meanwhile(crowd, group):
    begun_s = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as asking:
        for number in range(40):
            asking.create_task(crowd.ask(f"r{number}"))
        await asyncio.sleep(0.5)
        assert crowd.num_queued >= 40 - WORKERS * (PLACES + 2)
    assert max(crowd.queued) <= PLACES + 1, "for a step's time, as all places come free at once"
    assert sum(crowd.queued) / len(crowd.queued) < 1.2
    took_s = asyncio.get_running_loop().time() - begun_s
    assert took_s < 1.1 * 40 / (WORKERS * PLACES) * ANSWER_S
