"""A registration of several data-parallel ranks is a routing target for each, and comes and goes as a whole."""

import asyncio

import pytest

from penstock.core.errors import RequestError
from penstock.core.ids import WorkerId
from penstock.core.types.instances import EngineInfo, Instance, InstanceState, Prices, Role
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.engine.mock import MockConfig, MockRanks, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.router.config import RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.fleet.member import Condition
from penstock.router.fleet.slots import Ranks
from penstock.sim.loop import run_virtual
from tests.support.cluster import MemoryCluster, small_card
from tests.support.scene import make_request
from tests.support.scenes import scenes

CONFIG = RouterConfig(policy="kv")
BLOCKS = 80


def instance(data_parallel: int = 2) -> Instance:
    return Instance(
        worker_id=WorkerId(7),
        name="w1",
        address="memory://1",
        role=Role.AGGREGATED,
        card=small_card(),
        engine=EngineInfo(4, 10, 400, 512, 8, data_parallel=data_parallel),
        prices=Prices(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    )


def test_a_sequence_of_one_rank_costs_what_one_on_each_does() -> None:
    plain, *rest = Ranks().put(instance(1))
    assert (plain, rest) == (instance(1), [])
    first, _ = Ranks().put(instance(2))
    assert first.prices == Prices(1.0, 2.0, 3.0, 4.0, 10.0, 12.0)


def engine_of(ranks: int = 2) -> MockRanks:
    shape = RunnerInfo(num_blocks=BLOCKS, block_size=4, context_length=400, vocab_size=1000)
    return MockRanks([mock_engine(shape, MockConfig(), SchedulerConfig()) for _ in range(ranks)])


def request(request_id: str, first: int, *, max_tokens: int = 4) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return make_request(request_id, range(first, first + 41), sampling=sampling)


async def answer(dispatcher: Dispatcher, asked: Request) -> tuple[str, int]:
    """Run a request; give the worker that answered and the prompt tokens that it had cached."""
    cached = 0
    async with dispatcher.open(asked) as stream:
        async for delta in stream:
            cached = delta.cached_tokens or cached
    return dispatcher.explain(asked.request_id)[-1].worker, cached


def views(dispatcher: Dispatcher) -> dict[str, Condition]:
    return {view.name: view.condition for view in dispatcher.workers()}


def run(scene) -> None:
    async def main() -> None:
        async with MemoryCluster() as cluster, cluster.dispatcher(CONFIG) as dispatcher:
            await cluster.start("w1", engine_of())
            await asyncio.sleep(0.01)
            await scene(cluster, dispatcher)
            dispatcher.check()

    run_virtual(main())


scenario = scenes(run, 2)()


@scenario
async def test_a_prompt_goes_to_the_rank_that_holds_it(cluster, dispatcher):
    (first, cold), (second, _) = await asyncio.gather(
        answer(dispatcher, request("a", 100)), answer(dispatcher, request("b", 500))
    )
    assert {first, second} == {"w1/0", "w1/1"}, "idle ranks share the load"
    assert cold == 0
    for number in range(4):
        assert await answer(dispatcher, request(f"a{number}", 100)) == (first, 40)
        assert await answer(dispatcher, request(f"b{number}", 500)) == (second, 40)
    held = {view.name: view.indexed_blocks for view in dispatcher.workers()}
    assert 10 <= held[first] < BLOCKS
    assert 10 <= held[second] < BLOCKS
    worker = cluster.worker("w1")
    worker.check()
    rank = int(first[-1])
    mirror = worker.publishers.ranks[rank].mirror.counts()
    assert len(mirror) == held[first], "the index has what this rank said, and nothing of the other"


@scenario
async def test_a_registration_comes_and_goes_with_all_its_ranks(cluster, dispatcher):
    assert views(dispatcher) == {"w1/0": Condition.READY, "w1/1": Condition.READY}
    with pytest.raises(RequestError, match="w1/1 is a data-parallel rank of worker w1"):
        await dispatcher.sleep("w1/1", 1)
    changed = await dispatcher.sleep("w1", 1)
    assert (changed.worker, changed.state) == ("w1", InstanceState.ASLEEP)
    assert set(views(dispatcher).values()) == {Condition.ASLEEP}
    await dispatcher.wake_up("w1")
    assert set(views(dispatcher).values()) == {Condition.READY}
    cluster.kill("w1")
    await asyncio.sleep(20)
    assert views(dispatcher) == {}


@scenario
async def test_what_a_dead_worker_ran_goes_to_another_worker_not_to_its_other_rank(cluster, dispatcher):
    await cluster.start("w2", engine_of())
    await asyncio.sleep(0.01)

    async def run_whole(asked: Request) -> None:
        tokens, reason = 0, None
        async with dispatcher.open(asked) as stream:
            async for delta in stream:
                tokens += len(delta.token_ids) // 4
                reason = delta.finish_reason
        assert (tokens, reason) == (60, FinishReason.LENGTH)

    async with asyncio.TaskGroup() as group:
        asked = [request(f"r{number}", 60 * number, max_tokens=60) for number in range(8)]
        for each in asked:
            group.create_task(run_whole(each))
        await asyncio.sleep(0.1)
        before = {each.request_id: dispatcher.explain(each.request_id)[-1].worker for each in asked}
        assert len(set(before.values())) == 4
        cluster.kill("w1")
    moved = [dispatcher.explain(name) for name, worker in before.items() if worker.startswith("w1/")]
    for decisions in moved:
        assert len(decisions) == 2, "moved once"
        assert decisions[-1].worker.startswith("w2/")
