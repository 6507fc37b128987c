"""What can go wrong while KV moves, one thing at a time, and what is left of it."""

import asyncio
import itertools
from unittest import mock

import msgspec
import pytest

from penstock.core.errors import Overloaded
from penstock.core.ids import RequestId
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.queue.request_queue import RequestQueue
from penstock.transfer.regions import copies
from penstock.transfer.regions.checksum import checksum_ranges, copy_summed
from penstock.worker.config import KvTransferConfig, WorkerConfig
from tests.support import kv_transfer_scene
from tests.support.flipped import flip
from tests.support.kv_transfer import (
    VOCAB,
    SlowTransport,
    tiny_engine,
    tiny_request,
    whole_answer,
)

BLOCKS = 12  # of a prompt of 50 tokens


def run_scenario(
    scene, names=("p0", "d0"), *, policy="least-loaded", read_s=0.0, kv_blocks=None, config=None
):
    kv_transfer_scene.run_scenario(
        scene,
        names,
        router=RouterConfig(policy=policy, disagg=DisaggConfig(remote_tokens_min=1)),
        engine=lambda name: tiny_engine((kv_blocks or {}).get(name, 200)),
        transport=lambda: SlowTransport(lambda _: read_s() if callable(read_s) else read_s),
        config=config,
    )


def fetched(cluster, name):
    return cluster.worker(name).kv_transfer.incoming.fetched_blocks


def exports(cluster, name="p0"):
    return len(cluster.worker(name).kv_transfer.exports)


async def read_and_leave(dispatcher, request, after_s):
    async with dispatcher.open(request) as stream:
        await anext(stream)
        going_on = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(after_s)
        going_on.cancel()


def test_a_worker_that_does_both_fetches_too():
    async def scene(cluster, dispatcher):
        await whole_answer(dispatcher, tiny_request("a"))
        assert fetched(cluster, "a0") == BLOCKS
        assert cluster.engine("a0").load().prefilled_tokens == 1

    run_scenario(scene, ("p0", "a0"))


def test_who_is_refused_by_one_decode_worker_goes_to_another():
    async def scene(cluster, dispatcher):
        cluster.worker("d0")._registration.refusal = Overloaded("full", retry_after_s=1.0)
        for number in range(4):
            await whole_answer(dispatcher, tiny_request(f"r{number}", seed=number))
        assert fetched(cluster, "d1") == 4 * BLOCKS
        assert cluster.worker("d1").kv_transfer.incoming.failures == {}
        assert cluster.engine("p0").load().prefilled_tokens <= 4 * 55, "no prompt was computed twice"

    run_scenario(scene, ("p0", "d0", "d1"))


def test_turns_are_taken_among_prefill_workers_and_among_decode_workers():
    async def scene(cluster, dispatcher):
        for number in range(4):
            await whole_answer(dispatcher, tiny_request(f"r{number}", seed=number))
        for name in ("p0", "p1"):
            assert cluster.engine(name).load().prefilled_tokens == 100
        for name in ("d0", "d1"):
            assert fetched(cluster, name) == 2 * BLOCKS

    run_scenario(scene, ("p0", "p1", "d0", "d1"), policy="round-robin")


def test_a_session_stays_with_its_prefill_worker_and_with_its_decode_worker():
    async def scene(cluster, dispatcher):
        del cluster
        used = set()
        for number in range(5):
            asked = tiny_request(f"r{number}", 60, seed=number)
            await whole_answer(dispatcher, msgspec.structs.replace(asked, session="s"))
            (decision,) = dispatcher.explain(f"r{number}")
            used.add((decision.prefill.worker, decision.worker))
        assert len(used) == 1, used

    run_scenario(scene, ("p0", "p1", "p2", "d0", "d1", "d2"), policy="session")


@pytest.mark.parametrize("length", [3, 50])
def test_a_request_is_counted_once(length):
    async def scene(cluster, dispatcher):
        del cluster
        await whole_answer(dispatcher, tiny_request("a", length))
        metrics = dispatcher._shared.metrics
        assert metrics.prompt_tokens._value.get() == length
        assert metrics.prefills.labels("remote")._value.get() == 1

    run_scenario(scene)


@pytest.mark.parametrize("read_s", [0.0, 2.0])
def test_who_leaves_while_his_prompt_is_transferred_leaves_nothing_held(read_s):
    async def scene(cluster, dispatcher):
        async with dispatcher.open(tiny_request("a")) as stream:
            await anext(stream)
            assert exports(cluster) == 1
        await asyncio.sleep(0.1)
        assert exports(cluster) == 0, "nobody had gone on with it"
        await read_and_leave(dispatcher, tiny_request("b"), 0.1)
        await asyncio.sleep(0.1 + read_s)
        assert exports(cluster) == 0
        assert cluster.engine("d0").load().active_blocks == 0

    run_scenario(scene, read_s=read_s)


def test_room_that_a_fetch_gives_back_is_another_ones():
    async def scene(cluster, dispatcher):
        begin_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            group.create_task(read_and_leave(dispatcher, tiny_request("a", 100), 0.5))
            await asyncio.sleep(0.3)
            group.create_task(whole_answer(dispatcher, tiny_request("b", 100, 5, seed=1)))
        assert asyncio.get_running_loop().time() - begin_s < 5
        assert fetched(cluster, "d0") == 25

    run_scenario(scene, kv_blocks={"d0": 40}, read_s=1.0)


def test_those_that_wait_for_room_do_not_hold_each_others():
    async def scene(cluster, dispatcher):
        for seed in (1, 2):
            await whole_answer(dispatcher, tiny_request(f"begun{seed}", 60, 2, seed=seed))
        begin_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            group.create_task(whole_answer(dispatcher, tiny_request("running", 40, 60, seed=3)))
            await asyncio.sleep(0.1)
            for seed in (1, 2):
                group.create_task(whole_answer(dispatcher, tiny_request(f"r{seed}", 120, 2, seed=seed)))
        assert asyncio.get_running_loop().time() - begin_s < 5
        assert cluster.worker("d0").kv_transfer.incoming.failures == {}

    run_scenario(scene, kv_blocks={"d0": 42})


def test_what_is_cached_does_not_wait_for_room():
    async def scene(cluster, dispatcher):
        await whole_answer(dispatcher, tiny_request("a", 40, 2))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(whole_answer(dispatcher, tiny_request("long", 40, 60, seed=1)))
            await asyncio.sleep(0.2)
            waiting = group.create_task(whole_answer(dispatcher, tiny_request("b", 130, 2, seed=2)))
            await asyncio.sleep(0.25)
            assert len(cluster.worker("d0").kv_transfer) == 1
            assert cluster.worker("d0")._driver.load().waiting_requests == 1
            await whole_answer(dispatcher, tiny_request("c", 40, 2))
            assert not running.done()
            assert not waiting.done()

    run_scenario(scene, kv_blocks={"d0": 40})


def test_a_handle_that_is_none_harms_nobody_else():
    async def scene(cluster, dispatcher):
        made = cluster.worker("p0").kv_transfer.exports

        class Exporting:
            make = staticmethod(
                lambda *args: msgspec.structs.replace(type(made).make(made, *args), block_ids=b"abc")
            )
            __getattr__ = staticmethod(lambda name: getattr(made, name))
            __len__ = staticmethod(lambda: len(made))

        cluster.worker("p0").kv_transfer.exports = Exporting()
        tokens, *_ = await whole_answer(dispatcher, tiny_request("a"))
        assert len(tokens) == 20
        assert cluster.worker("d0").kv_transfer.incoming.failures == {"protocol_error": 1}
        assert cluster.worker("d0")._driver.load().kv_failures == 1
        assert "d0" in cluster.names

    run_scenario(scene)


async def handle_of(cluster, dispatcher, request):
    """Have a prompt computed, and give the request that would go on, with its handle; its blocks stay pinned."""
    came = []
    incoming = cluster.worker("d0").kv_transfer.incoming
    exports = cluster.worker("p0").kv_transfer.exports
    with (
        mock.patch.object(incoming, "expect"),
        mock.patch.object(incoming, "fetch", side_effect=lambda request, *_: came.append(request)),
        mock.patch.object(exports, "forget"),
    ):
        async with dispatcher.open(request) as stream:
            await anext(stream)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
    return came[0]


def test_two_that_read_the_same_are_told_apart():
    delays_s = itertools.chain([0.1, 0.5], itertools.repeat(0.0))

    async def scene(cluster, dispatcher):
        request = await handle_of(cluster, dispatcher, tiny_request("a"))
        kv_transfer = cluster.worker("d0").kv_transfer
        submitted = []
        kv_transfer.incoming.fetch(request, "owner", submitted.append)
        kv_transfer.incoming.fetch(
            msgspec.structs.replace(request, request_id=RequestId("again")), "owner", submitted.append
        )
        await asyncio.sleep(1)
        assert [one.request_id for one in submitted] == ["a", "again"]
        assert fetched(cluster, "d0") == BLOCKS
        assert kv_transfer.incoming.failures == {"pin_expired": 1}

    run_scenario(scene, read_s=lambda: next(delays_s))


def test_an_id_that_is_given_up_and_used_again_at_once_is_the_new_ones():
    async def scene(cluster, dispatcher):
        request = await handle_of(cluster, dispatcher, tiny_request("a"))
        kv_transfer = cluster.worker("d0").kv_transfer
        submitted = []
        kv_transfer.incoming.fetch(request, "owner", submitted.append)
        await asyncio.sleep(0.1)
        assert kv_transfer.incoming.cancel(request.request_id)
        kv_transfer.incoming.fetch(request, "owner", submitted.append)
        await asyncio.sleep(0.1)
        assert len(kv_transfer) == 1
        assert kv_transfer.incoming.cancel(request.request_id)
        assert not kv_transfer.incoming.cancel(request.request_id)
        await asyncio.sleep(2)
        assert submitted == []

    run_scenario(scene, read_s=1.0)


def test_no_more_wait_for_their_kv_than_may():
    async def scene(cluster, dispatcher):
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(whole_answer(dispatcher, tiny_request(f"r{seed}", seed=seed)))
                for seed in range(4)
            ]
        assert [len(one.result()[0]) for one in asked] == [20] * 4
        assert fetched(cluster, "d0") <= fetched(cluster, "d1") + BLOCKS
        assert sum(fetched(cluster, name) for name in ("d0", "d1")) == 2 * BLOCKS

    with pytest.raises(BaseExceptionGroup) as caught:
        run_scenario(
            scene,
            ("p0", "d0", "d1"),
            read_s=1.0,
            config=WorkerConfig(kv_transfer=KvTransferConfig(fetches_max=1)),
        )
    assert caught.group_contains(Overloaded, match="fetches_max")


def test_a_last_token_of_a_context_is_no_kv_transfer():
    async def scene(cluster, dispatcher):
        for length, tokens in ((398, 2), (399, 1)):
            ids = pack_tokens([1 + index % (VOCAB - 1) for index in range(length)])
            asked = msgspec.structs.replace(tiny_request(f"r{length}"), token_ids=ids)
            found, reason, *_ = await whole_answer(dispatcher, asked)
            assert (len(found), reason.value) == (tokens, "length")
        assert cluster.engine("d0").load().generated_tokens == 1

    run_scenario(scene)


def test_a_decode_worker_that_dies_before_it_has_read_leaves_that_to_another():
    async def scene(cluster, dispatcher):
        asked = tiny_request("a")
        async with dispatcher.open(asked) as stream:
            tokens = unpack_tokens((await anext(stream)).token_ids).tolist()
            going_on = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.2)
            used = dispatcher.explain("a")[0].worker
            cluster.worker(used).kv_transfer.incoming._release = lambda *_: None  # who is dead says nothing
            cluster.kill(used)
            tokens += unpack_tokens((await going_on).token_ids).tolist()
            async for delta in stream:
                tokens += unpack_tokens(delta.token_ids).tolist()
        assert len(tokens) == 20
        (left,) = {"d0", "d1"} - {used}
        assert fetched(cluster, left) == BLOCKS
        assert cluster.engine("p0").load().prefilled_tokens <= 55, "it is planned anew, and p0 has it cached"

    run_scenario(scene, ("p0", "d0", "d1"), read_s=1.0)


def test_a_prompt_goes_to_no_prefill_worker_that_is_too_small_for_it():
    async def scene(cluster, dispatcher):
        for length, is_remote in ((94, True), (95, False), (150, False)):
            tokens, *_ = await whole_answer(dispatcher, tiny_request(f"r{length}", length, seed=length))
            assert len(tokens) == 20
            assert (dispatcher.explain(f"r{length}")[0].prefill is not None) is is_remote
        assert cluster.engine("p0").load().prefilled_tokens == 94

    run_scenario(scene, kv_blocks={"p0": 24})


def test_of_a_prompt_shorter_than_a_block_nothing_is_held():
    async def scene(cluster, dispatcher):
        async with dispatcher.open(tiny_request("a", 3)) as stream:
            await anext(stream)
            assert exports(cluster) == 0
            async for _ in stream:
                pass
        assert cluster.engine("d0").load().prefilled_tokens == 4
        sent = cluster.worker("d0").kv_transfer._agent.counters.notifications_sent
        assert sent == 0, "nor is anybody told of it"

    run_scenario(scene)


def test_who_waits_for_room_longer_than_its_handle_lasts_is_computed_where_it_is():
    asked = tiny_request("a", 120, 5)

    async def scene(cluster, dispatcher):
        running = asyncio.ensure_future(whole_answer(dispatcher, tiny_request("running", 40, 120, seed=3)))
        await asyncio.sleep(0.2)
        waiting = asyncio.ensure_future(whole_answer(dispatcher, asked))
        await asyncio.sleep(0.8)
        assert cluster.worker("d0").kv_transfer.incoming.failures == {"deadline_exceeded": 1}
        assert exports(cluster) == 0
        assert not running.done()
        tokens, *_ = await waiting
        assert len(tokens) == 5
        assert cluster.engine("d0").load().prefilled_tokens > 120
        await running

    config = WorkerConfig(kv_transfer=KvTransferConfig(pin_ttl_s=0.5, stream_kv=False))
    run_scenario(scene, kv_blocks={"d0": 42}, config=config)


def test_a_prefill_worker_that_dies_before_it_has_answered_is_not_waited_for():
    async def scene(cluster, dispatcher):
        async with dispatcher.open(tiny_request("a")) as stream:
            await anext(stream)
            cluster.worker("p0").kv_transfer._notify = lambda *_: None
            second = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(1)
            assert not second.done()
            cluster.kill("p0")
            async with asyncio.timeout(1):
                await second
            assert cluster.worker("d0").kv_transfer.incoming.failures == {"peer_lost": 1}

    run_scenario(scene)


@pytest.mark.parametrize(("share", "again"), [(0.06, 3), (0.065, 1)])
def test_a_last_block_past_the_bound_is_not_held(share, again):
    async def scene(cluster, dispatcher):
        await whole_answer(dispatcher, tiny_request("a"))
        assert fetched(cluster, "d0") == BLOCKS
        assert cluster.engine("d0").load().prefilled_tokens == again

    run_scenario(scene, config=WorkerConfig(kv_transfer=KvTransferConfig(pinned_share_max=share)))


def test_who_has_a_token_is_not_held_at_the_router_once_more():
    """The decode worker refuses it, so that it is planned anew."""

    async def scene(cluster, dispatcher):
        async with dispatcher.open(tiny_request("a")) as stream:
            used = dispatcher.explain("a")[0].worker
            cluster.worker(used)._registration.refusal = Overloaded("full", retry_after_s=1.0)
            with mock.patch.object(RequestQueue, "stops", return_value=True):
                async with asyncio.timeout(10):
                    tokens = [token async for delta in stream for token in unpack_tokens(delta.token_ids)]
        assert len(tokens) == 20

    run_scenario(scene, ("p0", "d0", "d1"))


@pytest.mark.parametrize("length", [50, 200])
def test_a_bit_that_flips_on_the_way_is_noticed_and_the_answer_is_the_same(length):
    flipped = []

    def copy(targets, sources, lengths, threads, stop):
        copy_summed(targets, sources, lengths, threads, stop)
        if not flipped:
            flip(targets[0])
            flipped.append(len(targets))
        return checksum_ranges(targets, lengths)

    async def scene(cluster, dispatcher):
        expected = await whole_answer(dispatcher, tiny_request("first", length, seed=1))
        for name in ("p0", "d0"):
            cluster.engine(name).clear_cache()
        await asyncio.sleep(0.1)
        with mock.patch.object(copies, "copy_summed", copy):
            found = await whole_answer(dispatcher, tiny_request("again", length, seed=1))
        assert flipped
        assert found[:2] == expected[:2]
        incoming = cluster.worker("d0").kv_transfer.incoming
        counts = incoming.failures | incoming.early_failures
        assert counts == {"checksum_mismatch": 1}, "an early one is read again with the request"
        assert incoming.corrupt == 1
        assert cluster.worker("d0")._driver.load().kv_corrupt == 1

    run_scenario(scene)
