"""Sessions of agents through routers and workers, on virtual time, with mock engines."""

import asyncio

import pytest
from msgspec.structs import replace

from penstock.core.errors import RequestError
from penstock.core.hashing import block_hashes
from penstock.core.types.kv import KvEvict, KvList, KvPin, KvUnpin
from penstock.core.types.requests import SessionAction, SessionControl
from penstock.core.wire import pack_hashes
from penstock.router.config import RouterConfig
from tests.support.kv_transfer import tiny_request, whole_answer
from tests.support.kv_transfer_scene import run_scenario, scenario

OPEN = SessionControl(action=SessionAction.OPEN, ttl_s=20)
CLOSE = SessionControl(action=SessionAction.CLOSE)
ROUND_ROBIN = RouterConfig(policy="round-robin")
TWO = ("a0", "a1")


def ask(name, control=None, *, session="agent", seed=0, max_tokens=20):
    return replace(
        tiny_request(name, seed=seed, max_tokens=max_tokens), session=session, session_control=control
    )


def keepers(cluster):
    return [name for name in cluster.names if len(cluster.engine(name).scheduler.sessions)]


def worker_of(dispatcher, request_id):
    return dispatcher.explain(request_id)[-1].worker


@scenario(TWO, router=ROUND_ROBIN)
async def test_a_session_stays_at_one_worker_under_any_policy(cluster, dispatcher):
    await whole_answer(dispatcher, ask("first", OPEN))
    (keeper,) = keepers(cluster)
    for number in range(5):
        await whole_answer(dispatcher, ask(f"other{number}", session=None, seed=number))
        await whole_answer(dispatcher, ask(f"next{number}"))
        assert worker_of(dispatcher, f"next{number}") == keeper
        assert dispatcher.explain(f"next{number}")[-1].reason == "session"
    await whole_answer(dispatcher, ask("last", CLOSE))
    assert keepers(cluster) == []
    after = {
        worker_of(dispatcher, f"after{n}")
        for n in range(2)
        if await whole_answer(dispatcher, ask(f"after{n}"))
    }
    assert len(after) == 2


@scenario(TWO, router=ROUND_ROBIN)
async def test_a_refused_ttl_does_not_spoil_the_sessions_later_requests(cluster, dispatcher):
    forever = SessionControl(action=SessionAction.OPEN, ttl_s=1e308)
    with pytest.raises(RequestError, match=r"session\.ttl_s: must be <= 3600"):
        await whole_answer(dispatcher, ask("wrong", forever))
    await whole_answer(dispatcher, ask("without"))
    assert keepers(cluster) == []
    await whole_answer(dispatcher, ask("right", OPEN))
    (keeper,) = keepers(cluster)
    with pytest.raises(RequestError):
        await whole_answer(dispatcher, ask("wrong again", forever))
    await whole_answer(dispatcher, ask("next"))
    assert worker_of(dispatcher, "next") == keeper


@scenario(TWO, router=ROUND_ROBIN)
async def test_a_session_of_a_lost_worker_goes_on_at_another_that_keeps_it_too(cluster, dispatcher):
    text, *_ = await whole_answer(dispatcher, ask("first", OPEN))
    (keeper,) = keepers(cluster)
    cluster.kill(keeper)
    assert (await whole_answer(dispatcher, ask("second")))[0] == text
    (other,) = keepers(cluster)
    assert other != keeper


@scenario(("p0", "d0"))
async def test_the_decode_worker_keeps_a_sessions_kv(cluster, dispatcher):
    await whole_answer(dispatcher, ask("first", OPEN))
    await whole_answer(dispatcher, ask("second", seed=1))
    assert keepers(cluster) == ["d0"]
    assert cluster.engine("d0").load().sessions.pinned_blocks > 12
    await asyncio.sleep(21)
    assert keepers(cluster) == []


@scenario(TWO, router=ROUND_ROBIN)
async def test_operators_act_on_one_worker_or_on_all(cluster, dispatcher):
    request = tiny_request("first")
    await whole_answer(dispatcher, request)
    holder = worker_of(dispatcher, "first")
    hashes = pack_hashes(block_hashes(request.token_ids, 4, request.salt).ravel())
    pinned = {
        acted.worker: acted.blocks
        for acted in await dispatcher.act_on_kv(KvPin(name="p", block_hashes=hashes, ttl_s=5), None)
    }
    assert pinned == {name: 12 if name == holder else 0 for name in TWO}
    listed = {acted.worker: acted.held for acted in await dispatcher.act_on_kv(KvList(), None)}
    assert [held.name for held in listed[holder]] == ["p"]
    (acted,) = await dispatcher.act_on_kv(KvUnpin(name="p"), holder)
    assert (acted.worker, acted.blocks) == (holder, 12)
    with pytest.raises(RequestError, match="no pin 'p' here") as caught:
        await dispatcher.act_on_kv(KvUnpin(name="p"), None)
    assert caught.value.http_status == 404
    with pytest.raises(RequestError, match="there is no worker 'nobody'; known: a0, a1"):
        await dispatcher.act_on_kv(KvList(), "nobody")
    (acted,) = await dispatcher.act_on_kv(KvEvict(block_hashes=hashes), holder)
    assert acted.blocks == 12
    await asyncio.sleep(0.2)
    await whole_answer(dispatcher, tiny_request("again"))


@pytest.mark.parametrize(("stay_s", "stays"), [(0.0, False), (100.0, True)])
def test_a_session_moves_where_staying_costs_too_much(stay_s, stays):
    async def scene(cluster, dispatcher):
        await whole_answer(dispatcher, ask("first", OPEN))
        (keeper,) = keepers(cluster)
        async with dispatcher.open(ask("beside", max_tokens=200)) as stream:  # keeps its worker busy
            await anext(stream)
            await asyncio.sleep(0.3)
            await whole_answer(dispatcher, ask("next", seed=5, max_tokens=2))  # of which nothing is cached
            assert (worker_of(dispatcher, "next") == keeper) is stays
            await asyncio.sleep(0.1)
            assert (keepers(cluster) == [keeper]) is stays
            assert len(keepers(cluster)) == 1

    run_scenario(scene, TWO, router=RouterConfig(session_stay_s=stay_s))
