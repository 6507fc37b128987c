"""LoRA adapters: requests go only where theirs is, and prefixes of different ones never mix."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.core.errors import Unavailable
from penstock.core.types.requests import FinishReason, Request
from penstock.router.config import RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.loop import run_virtual
from penstock.worker.config import WorkerConfig
from tests.support.cluster import MemoryCluster, small_card
from tests.support.manual_engine import ManualEngine
from tests.support.scene import make_request
from tests.support.scenes import scenes

Scene = Callable[[MemoryCluster, Dispatcher, dict[str, ManualEngine]], Awaitable[None]]


def run_scenario(scene: Scene, workers: dict[str, tuple[str, ...]], **config: object) -> None:
    async def main() -> None:
        settings = RouterConfig.parse(config, source="test")
        async with MemoryCluster() as cluster, cluster.dispatcher(settings) as dispatcher:
            engines = {name: ManualEngine() for name in workers}
            for name, adapters in workers.items():
                silent = WorkerConfig(kv_events=False)
                await cluster.start(name, engines[name], config=silent, adapters=adapters)
            await asyncio.sleep(0.01)
            await scene(cluster, dispatcher, engines)
            dispatcher.check()

    run_virtual(main())


scenario = scenes(run_scenario, 3)


def asked(request_id: str, adapter: str | None = None) -> Request:
    card = small_card() if adapter is None else small_card().adapted(adapter)
    return make_request(request_id, salt=card.salt, adapter=adapter)


async def answered(dispatcher: Dispatcher, engines: dict[str, ManualEngine], request: Request) -> str:
    """Run a request to its end; returns who answered."""
    async with dispatcher.open(request) as stream:
        worker = dispatcher.explain(request.request_id)[-1].worker
        await asyncio.sleep(0.001)
        engines[worker].emit(request.request_id, 1, finish=FinishReason.STOP, cached_tokens=0)
        async for _ in stream:
            pass
    return worker


@scenario({"w1": ()}, no_worker_wait_s=5.0)
async def test_a_request_waits_for_its_adapter_and_no_other_worker_will_do(cluster, dispatcher, engines):
    async def start() -> None:
        await asyncio.sleep(2)
        engines["w2"] = ManualEngine()
        await cluster.start("w2", engines["w2"], adapters=("b",))

    async with asyncio.TaskGroup() as group:
        group.create_task(start())
        async with dispatcher.open(asked("r", "b")):
            assert dispatcher.explain("r")[0].worker == "w2"
    with pytest.raises(Unavailable, match=r"model c: no worker was ready within 5 s; models .*: b, tiny"):
        await dispatcher.open(asked("s", "c")).__aenter__()


@scenario({"w1": ("a",), "w2": ("b",)}, queue={"threshold_s": 1.0})
async def test_who_waits_for_one_adapter_holds_nobody_up_who_asks_for_another(cluster, dispatcher, engines):
    engines["w1"].report(running_requests=1, waiting_requests=1, queued_prefill_tokens=1_000_000)
    await asyncio.sleep(1)
    waiting = asyncio.ensure_future(dispatcher.open(asked("r", "a")).__aenter__())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert await answered(dispatcher, engines, asked("s", "b")) == "w2"
    engines["w1"].report()
    await asyncio.sleep(1)
    assert dispatcher.explain("r")[0].worker == "w1"
    await waiting.result().__aexit__(None, None, None)
