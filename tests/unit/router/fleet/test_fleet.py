"""What a frontend knows of its workers: health, prefixes, loads, files; and the routes that follow."""

import asyncio
import hashlib

import msgspec
import numpy as np
import pytest

from penstock.core.errors import Unavailable
from penstock.core.types.instances import CardFile, Role
from penstock.core.types.requests import Request
from penstock.router.config import RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.fleet.member import Condition
from penstock.seams import RoutingContext
from tests.support.cluster import MemoryCluster, small_card
from tests.support.kv_transfer import tiny_engine
from tests.support.manual_engine import ManualEngine
from tests.support.scene import HASHES, make_request, scenario, settle, stored, view


async def route(dispatcher: Dispatcher, request: Request) -> str:
    """Open and leave a request; returns who got it."""
    async with dispatcher.open(request):
        return dispatcher.latest_decisions(1)[-1].worker


@scenario(config=RouterConfig(busy_kv_share=0.5, busy_queued_tokens=30))
async def test_busy_workers_get_requests_only_while_all_are(cluster, dispatcher, engines):
    engines["w1"].step(events=[stored(HASHES)])
    await settle()
    for figures, is_busy in (
        ({"queued_prefill_tokens": 31}, True),
        ({"active_blocks": 501, "total_blocks": 1000}, True),
        ({"active_blocks": 500, "total_blocks": 1000}, False),
    ):
        engines["w1"].report(**figures)
        await asyncio.sleep(1.0)
        assert (await route(dispatcher, make_request("r")) != "w1") is is_busy, figures
        assert dispatcher.latest_decisions(1)[-1].num_candidates == 3 - is_busy
    for engine in engines.values():
        engine.report(queued_prefill_tokens=31)
    await asyncio.sleep(1.0)
    assert await route(dispatcher, make_request("r")) in engines
    assert dispatcher.latest_decisions(1)[-1].num_candidates == 3


@scenario(num_workers=2)
async def test_each_models_requests_go_to_its_own_workers_whoever_has_the_prefix_or_time(
    cluster, dispatcher, engines
):
    other = ManualEngine()
    await cluster.start("other", other, card=small_card("other"))
    engines["w1"].step(events=[stored(HASHES)])
    await settle()
    assert sorted(dispatcher.models()) == ["other", "tiny"]
    for number in range(3):  # the same blocks, as both have the same salt
        asked = msgspec.structs.replace(make_request(f"r{number}"), model="other")
        assert await route(dispatcher, asked) == "other"
        assert await route(dispatcher, make_request(f"s{number}")) == "w1"
    other.step(events=[stored(HASHES)])
    cluster.kill("w1")
    await settle()
    assert await route(dispatcher, make_request("t")) == "w2"
    (decision,) = dispatcher.explain("t")
    assert [left.worker for left in decision.left_out] == ["w1"], "the other model's is no candidate"


@pytest.mark.virtual
async def test_a_new_frontend_has_looked_once_it_has_tried_all_workers_that_are_listed():
    async with MemoryCluster() as cluster:
        async with cluster.dispatcher() as alone:
            await alone.looked()
        for name in ("w1", "w2"):
            await cluster.start(name, ManualEngine())
        cluster.kill("w2")  # it is listed until its lease ends
        async with cluster.dispatcher() as dispatcher:
            assert not dispatcher.models()
            await asyncio.wait_for(dispatcher.looked(), 1.0)
            assert list(dispatcher.models()) == ["tiny"]
            conditions = {v.name: (v.condition, v.problem is None) for v in dispatcher.workers()}
            assert conditions == {"w1": (Condition.READY, True), "w2": (Condition.CONNECTING, False)}
            dispatcher.check()


@scenario(num_workers=0)
async def test_a_model_or_adapter_whose_only_worker_drains_is_not_unknown(cluster, dispatcher, engines):
    """Who asks for it is told to come back: another worker may be on its way."""

    worker = await cluster.start("w1", ManualEngine(), adapters=["sql"])
    await settle()
    assert set(dispatcher.models()) == {"tiny", "sql"}
    assert not dispatcher.expects("sql"), "it is there"
    async with dispatcher.open(make_request()):
        await settle()
        worker.stop()
        await settle()
        assert not dispatcher.models()
        assert [dispatcher.expects(name) for name in ("tiny", "sql", "poems")] == [True, True, False]
    await asyncio.sleep(5.0)
    assert not dispatcher.expects("tiny"), "it is gone"


@pytest.mark.parametrize(
    ("odd", "others"), [(Role.AGGREGATED, 2), (Role.PREFILL, 1)], ids=["fewer", "answers nobody"]
)
@pytest.mark.virtual
async def test_a_router_that_starts_takes_the_blocks_that_most_who_answer_have(odd, others):
    async with MemoryCluster() as cluster:
        other = msgspec.structs.replace(small_card(), salt=b"another")
        await cluster.start("odd", tiny_engine(), role=odd, card=other)
        for number in range(others):
            await cluster.start(f"w{number}", tiny_engine())
        async with cluster.dispatcher() as dispatcher:
            await dispatcher.looked()
            assert view(dispatcher, "odd").condition is Condition.MISMATCHED
            assert await route(dispatcher, make_request()) in ("w0", "w1")
            await cluster.start("more", tiny_engine(), card=other)
            await cluster.start("most", tiny_engine(), card=other)
            await settle()
            assert view(dispatcher, "w0").condition is Condition.READY, "who rules goes on"
            dispatcher.check()


@pytest.mark.virtual
async def test_a_version_of_which_only_prefill_workers_are_left_gives_way_in_time():
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        await cluster.start("p", tiny_engine(), role=Role.PREFILL)
        await cluster.start("old", tiny_engine(), role=Role.DECODE)
        await dispatcher.looked()
        new = msgspec.structs.replace(small_card(), salt=b"new")
        await cluster.start("new", tiny_engine(), role=Role.DECODE, card=new)
        await asyncio.sleep(200)
        assert view(dispatcher, "new").condition is Condition.MISMATCHED, "the old one answers"
        cluster.worker("old").stop()
        await asyncio.sleep(50)
        assert view(dispatcher, "new").condition is Condition.MISMATCHED, "the old one may come back"
        await asyncio.sleep(50)
        assert view(dispatcher, "new").condition is Condition.READY
        assert view(dispatcher, "p").condition is Condition.MISMATCHED
        assert await route(dispatcher, make_request()) == "new"
        dispatcher.check()


@scenario(num_workers=0)
async def test_prefill_workers_get_no_whole_requests(cluster, dispatcher, engines):
    await cluster.start("w1", tiny_engine(), role=Role.PREFILL)
    await settle()
    assert view(dispatcher, "w1").condition is Condition.PREFILL_ONLY
    assert not dispatcher.models()
    advice = r"one of the 1 that only compute prompts answer \(penstock role w1 decode\)"
    with pytest.raises(Unavailable, match=advice):
        async with dispatcher.open(make_request()):
            pass


@scenario(num_workers=3, config=RouterConfig(workers_max=2))
async def test_too_many_workers_are_left_out_until_there_is_room(cluster, dispatcher, engines):
    assert [worker.name for worker in dispatcher.workers()] == ["w1", "w2"]
    cluster.worker("w1").stop()
    await asyncio.sleep(1.0)
    assert [(w.name, w.condition) for w in dispatcher.workers()] == [("w3", "ready"), ("w2", "ready")]
    engines["w3"].step(events=[stored(HASHES)])
    await settle()
    assert await route(dispatcher, make_request()) == "w3"


@pytest.mark.virtual
async def test_files_come_from_any_worker_that_has_them():
    content = b"{}"
    file = CardFile(name="tokenizer.json", sha256=hashlib.sha256(content).hexdigest(), size_bytes=2)
    card = msgspec.structs.replace(small_card(), files=(file,))
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        await cluster.start("w1", ManualEngine(), card=card)  # lists it and has lost it
        await cluster.start("w2", ManualEngine(), card=card, files={file.sha256: content})
        await asyncio.sleep(0.01)
        for _ in range(5):
            assert await dispatcher.fetch_file(dispatcher.models()["tiny"], file) == content
        cluster.kill("w2")
        await settle()
        with pytest.raises(Unavailable, match=r"tokenizer.json could not be fetched from any of 1 connected"):
            await dispatcher.fetch_file(card, file)


@pytest.mark.virtual
async def test_forwarded_requests_stay_here_and_other_deployments_count_for_no_load():
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        elsewhere = ManualEngine()
        elsewhere.info = msgspec.structs.replace(elsewhere.info, is_deployment=True)
        await cluster.start("elsewhere", elsewhere)
        await asyncio.sleep(0.01)
        assert await route(dispatcher, make_request("a")) == "elsewhere"
        await cluster.start("here", ManualEngine())
        await asyncio.sleep(0.01)
        forwarded = msgspec.structs.replace(make_request("b"), is_forwarded=True)
        assert await route(dispatcher, forwarded) == "here"
        pooled = msgspec.structs.replace(make_request("c"), embeds=True)
        assert await route(dispatcher, pooled) == "here", "the link makes none"
        load = dispatcher.load("tiny")
        assert (load.workers, load.total_blocks) == (1, 100)
        assert dispatcher.load("other") is None
        dispatcher.check()


class First:
    """A policy that rules out all but the first worker."""

    name = "first"

    def costs(self, context: RoutingContext) -> np.ndarray:
        return np.where(np.arange(len(context.eligible)) == 0, 7.0, np.inf)


@scenario(config=RouterConfig(policy=f"{__name__}:First"))
async def test_who_is_ruled_out_gets_nothing_and_is_told_so(cluster, dispatcher, engines):
    assert await route(dispatcher, make_request()) == "w1"
    decision = dispatcher.latest_decisions(1)[-1]
    assert (decision.num_candidates, decision.next_worker, decision.unit) == (3, None, "none")
    assert [(c.cost, c.terms) for c in decision.candidates] == [(7.0, {}), (None, {}), (None, {})]
