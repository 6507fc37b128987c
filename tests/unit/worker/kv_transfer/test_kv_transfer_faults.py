"""What can go wrong while KV moves, one thing at a time, and what is left of it."""

import asyncio
from unittest import mock

import msgspec
import pytest

from penstock.core.errors import Overloaded
from penstock.core.wire import pack_tokens
from penstock.transfer.regions import copies
from penstock.transfer.regions.ranges import checksum_ranges, copy_summed
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
from tests.support.scenes import run_by

BLOCKS = 12  # of a prompt of 50 tokens


def run_scenario(scene, names=("p0", "d0"), *, read_s=0.0, kv_blocks=None, config=None):
    kv_transfer_scene.run_scenario(
        scene,
        names,
        engine=lambda name: tiny_engine((kv_blocks or {}).get(name, 200)),
        transport=lambda: SlowTransport(lambda _: read_s),
        config=config,
    )


def fetched(cluster, name):
    return cluster.worker(name).kv_transfer.incoming.fetched_blocks


@run_by(run_scenario, kv_blocks={"d0": 42})
async def test_those_that_wait_for_room_do_not_hold_each_others(cluster, dispatcher):
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


@run_by(run_scenario)
async def test_a_last_token_of_a_context_is_no_kv_transfer(cluster, dispatcher):
    for length, tokens in ((398, 2), (399, 1)):
        ids = pack_tokens([1 + index % (VOCAB - 1) for index in range(length)])
        asked = msgspec.structs.replace(tiny_request(f"r{length}"), token_ids=ids)
        found, reason, *_ = await whole_answer(dispatcher, asked)
        assert (len(found), reason.value) == (tokens, "length")
    assert cluster.engine("d0").load().generated_tokens == 1


@run_by(run_scenario, kv_blocks={"p0": 24})
async def test_a_prompt_goes_to_no_prefill_worker_that_is_too_small_for_it(cluster, dispatcher):
    for length, is_remote in ((94, True), (95, False), (150, False)):
        tokens, *_ = await whole_answer(dispatcher, tiny_request(f"r{length}", length, seed=length))
        assert len(tokens) == 20
        assert (dispatcher.explain(f"r{length}")[0].prefill is not None) is is_remote
    assert cluster.engine("p0").load().prefilled_tokens == 94


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
@run_by(run_scenario)
async def test_a_bit_that_flips_on_the_way_is_noticed_and_the_answer_is_the_same(
    cluster, dispatcher, *, length
):
    flipped = []

    def copy(targets, sources, lengths, threads, stop):
        copy_summed(targets, sources, lengths, threads, stop)
        if not flipped:
            flip(targets[0])
            flipped.append(len(targets))
        return checksum_ranges(targets, lengths)

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
    assert kv_transfer_scene.load_of(dispatcher, "d0")["kv_corrupt"] == 1
