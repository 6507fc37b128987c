"""What can go wrong while KV moves, one thing at a time, and what is left of it."""

import asyncio
from unittest import mock

import msgspec
import pytest

from penstock.core.errors import Overloaded
from penstock.core.wire import pack_tokens
from penstock.router.config import DisaggConfig, RouterConfig
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
        transport=lambda: SlowTransport(lambda _: read_s),
        config=config,
    )


def fetched(cluster, name):
    return cluster.worker(name).kv_transfer.incoming.fetched_blocks


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
            assert len(cluster.worker("p0").kv_transfer.exports) == 0
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
        assert len(cluster.worker("p0").kv_transfer.exports) == 0
        assert not running.done()
        tokens, *_ = await waiting
        assert len(tokens) == 5
        assert cluster.engine("d0").load().prefilled_tokens > 120
        await running

    config = WorkerConfig(kv_transfer=KvTransferConfig(pin_ttl_s=0.5, stream_kv=False))
    run_scenario(scene, kv_blocks={"d0": 42}, config=config)


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
