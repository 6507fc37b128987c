"""LoRA adapters: requests go only where theirs is, and prefixes of different ones never mix."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from penstock.core.errors import RequestError, Unavailable
from penstock.core.ids import RequestId
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.router.config import RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.explain.explanation import LeftOut, RouteReason
from penstock.router.service.gateway import Query, Server
from penstock.router.service.routing_service import RoutingService
from penstock.sim.loop.loop import run_virtual
from penstock.worker.config import WorkerConfig
from tests.support.cluster import MemoryCluster, small_card
from tests.support.manual_engine import ManualEngine

PROMPT = tuple(range(100, 121))

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


def make_request(request_id: str, adapter: str | None = None) -> Request:
    card = small_card() if adapter is None else small_card().adapted(adapter)
    return Request(
        request_id=RequestId(request_id),
        model="tiny",
        token_ids=pack_tokens(PROMPT),
        sampling=SamplingParams(max_tokens=9),
        salt=card.salt,
        adapter=adapter,
    )


async def answered(dispatcher: Dispatcher, engines: dict[str, ManualEngine], request: Request) -> str:
    """Run a request to its end; returns who answered."""
    async with dispatcher.open(request) as stream:
        worker = dispatcher.explain(request.request_id)[-1].worker
        await asyncio.sleep(0.001)
        engines[worker].emit(request.request_id, 1, finish=FinishReason.STOP, cached_tokens=0)
        async for _ in stream:
            pass
    return worker


def test_requests_go_to_a_holder_of_their_adapter_only():
    async def scene(cluster: MemoryCluster, dispatcher: Dispatcher, engines: dict[str, ManualEngine]) -> None:
        for number in range(6):
            assert await answered(dispatcher, engines, make_request(f"a{number}", "a")) == "w1"
            assert await answered(dispatcher, engines, make_request(f"b{number}", "b")) in {"w2", "w3"}
        decision = dispatcher.explain("a0")[0]
        assert (decision.adapter, decision.reason, decision.num_candidates) == (
            "a",
            RouteReason.ONLY_WORKER,
            1,
        )
        assert decision.left_out == tuple(
            LeftOut(worker=name, why="without_adapter") for name in ("w2", "w3")
        )
        (view,) = [view for view in dispatcher.workers() if view.name == "w2"]
        assert view.adapters == ("b",)

    run_scenario(scene, {"w1": ("a",), "w2": ("b",), "w3": ("b",)})


def test_prefixes_of_adapters_and_of_the_model_never_mix():
    async def scene(cluster: MemoryCluster, dispatcher: Dispatcher, engines: dict[str, ManualEngine]) -> None:
        cached = {}
        for adapter in (None, "a", "b", None, "a", "b"):
            request = make_request(f"{adapter}{len(cached)}", adapter)
            await answered(dispatcher, engines, request)
            cached[request.request_id] = dispatcher.explain(request.request_id)[0].chosen.overlap_blocks
        assert list(cached.values()) == [0, 0, 0, 5, 5, 5]

    run_scenario(scene, {"w1": ("a", "b")})


def test_the_names_of_blocks_differ_by_adapter_whatever_is_in_the_names():
    card = small_card()
    salts = [card.salt, *(card.adapted(name).salt for name in ("a", "b", "a|adapter=1:b"))]
    assert len({*salts, card.adapted("a").salt + b"|adapter=1:b"}) == 5
    adapted = card.adapted("a")
    assert (adapted.name, adapted.parent, adapted.block_size) == ("a", "tiny", card.block_size)


def test_models_list_adapters_while_somebody_has_them():
    async def scene(cluster: MemoryCluster, dispatcher: Dispatcher, engines: dict[str, ManualEngine]) -> None:
        assert list(dispatcher.models()) == ["tiny", "a", "b"]
        assert dispatcher.models()["b"].parent == "tiny"
        assert dispatcher.models() is dispatcher.models(), (
            "made once for all requests until something changes"
        )
        cluster.worker("w2").stop()
        await asyncio.sleep(0.01)
        assert list(dispatcher.models()) == ["tiny", "a"]

    run_scenario(scene, {"w1": ("a", "tiny"), "w2": ("b",)})


def test_a_request_waits_for_its_adapter_and_no_other_worker_will_do():
    async def scene(cluster: MemoryCluster, dispatcher: Dispatcher, engines: dict[str, ManualEngine]) -> None:
        async def start() -> None:
            await asyncio.sleep(2)
            engines["w2"] = ManualEngine()
            await cluster.start("w2", engines["w2"], adapters=("b",))

        async with asyncio.TaskGroup() as group:
            group.create_task(start())
            async with dispatcher.open(make_request("r", "b")):
                assert dispatcher.explain("r")[0].worker == "w2"
        with pytest.raises(Unavailable, match=r"model c: no worker was ready within 5 s; models .*: b, tiny"):
            await dispatcher.open(make_request("s", "c")).__aenter__()

    run_scenario(scene, {"w1": ()}, no_worker_wait_s=5.0)


def test_a_worker_refuses_what_it_does_not_have():
    async def scene(cluster: MemoryCluster, dispatcher: Dispatcher, engines: dict[str, ManualEngine]) -> None:
        cluster.worker("w1")._adapters = ()  # it says otherwise
        async with dispatcher.open(make_request("r", "a")) as stream:
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(1)
            assert [decision.worker for decision in dispatcher.explain("r")][-1] == "w2"
            engines["w2"].emit("r", 1, cached_tokens=0)
            await reading

    run_scenario(scene, {"w1": ("a",), "w2": ("a",)})


def test_the_router_alone_takes_an_adapter_for_a_model():
    async def main() -> None:
        async with RoutingService(rng=random.Random(0)) as service:
            await service.put("one", Server(url="http://one", model="m", adapters=("a",)))
            await service.put("two", Server(url="http://two", model="m", adapters=("b",)))
            for name, worker in (("a", "one"), ("b", "two"), ("a", "one")):
                assert service.route(Query(model=name, prompt="x" * 200)).worker == worker
            assert service.explain(service.route(Query(model="m", prompt="x" * 200)).id)[0].adapter is None
            with pytest.raises(RequestError, match="model 'c': no worker has it; known: a, b, m"):
                service.route(Query(model="c", prompt="x"))
            service.check()

    run_virtual(main())


def test_who_waits_for_one_adapter_holds_nobody_up_who_asks_for_another():
    async def scene(cluster: MemoryCluster, dispatcher: Dispatcher, engines: dict[str, ManualEngine]) -> None:
        busy = WorkerLoad(running_requests=1, waiting_requests=1, queued_prefill_tokens=1_000_000)
        dispatcher._shared.fleet.loads.report(0, busy)
        waiting = asyncio.ensure_future(dispatcher.open(make_request("r", "a")).__aenter__())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert await answered(dispatcher, engines, make_request("s", "b")) == "w2"
        dispatcher._shared.fleet.loads.report(0, WorkerLoad())
        await asyncio.sleep(0.1)
        assert dispatcher.explain("r")[0].worker == "w1"
        await waiting.result().__aexit__(None, None, None)

    run_scenario(scene, {"w1": ("a",), "w2": ("b",)}, queue={"threshold_s": 1.0})
