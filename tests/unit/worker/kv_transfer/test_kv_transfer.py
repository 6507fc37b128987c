"""KV transfers from prefill to decode workers: whole deployments on virtual time, whose KV is checked on every step."""

import asyncio

import msgspec
import pytest

from penstock.core.ids import PinId, RequestId, WorkerId
from penstock.core.types.requests import KvHandle, Prefetch
from penstock.core.wire import encode
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.worker.config import KvTransferConfig, WorkerConfig
from penstock.worker.kv_transfer.reader import PIN_MESSAGES, PinFollow
from tests.support import kv_transfer_scene
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import tiny_engine as engine
from tests.support.kv_transfer import tiny_request as request
from tests.support.kv_transfer import whole_answer as answer
from tests.support.scenes import run_by
from tests.support.worker_stage import Sink


async def expected(asked):
    """What one worker alone answers."""
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        await cluster.start("alone", engine())
        return await answer(dispatcher, asked)


def run_scenario(scene, *, kv_bytes=64, **options):
    kv_transfer_scene.run_scenario(scene, engine=lambda _name: engine(kv_bytes=kv_bytes), **options)


@pytest.mark.parametrize("kv_bytes", [64, 0])
@pytest.mark.parametrize("length", [3, 4, 50, 200])
def test_an_answer_is_the_same_as_from_one_worker(length, kv_bytes):
    asked = request("a", length, logprobs=2)

    async def scene(cluster, dispatcher):
        found = await answer(dispatcher, asked)
        assert found == await expected(asked)
        prefill, decode = cluster.engine("p0").load(), cluster.engine("d0").load()
        assert prefill.prefilled_tokens == length
        assert prefill.generated_tokens == 1
        assert decode.generated_tokens == 19
        assert decode.prefilled_tokens == (length + 1 if length < 4 else 1), "nothing is computed again"
        assert cluster.worker("d0").kv_transfer.incoming.fetched_blocks == length // 4
        assert cluster.worker("d0").kv_transfer.incoming.failures == {}

    run_scenario(scene, kv_bytes=kv_bytes)


@run_by(run_scenario)
async def test_what_the_decode_worker_has_is_not_fetched(cluster, dispatcher):
    await answer(dispatcher, request("a", 40))
    await answer(dispatcher, request("b", 60))
    assert cluster.worker("d0").kv_transfer.incoming.fetched_blocks == 15
    assert cluster.engine("p0").load().prefix_hit_tokens == 40


@run_by(run_scenario, config=WorkerConfig(kv_transfer=KvTransferConfig(pinned_share_max=0.01)))
async def test_no_more_blocks_are_held_than_allowed(cluster, dispatcher):
    asked = request("a")
    assert (await answer(dispatcher, asked))[:2] == (await expected(asked))[:2]
    assert cluster.worker("p0").kv_transfer.exports.refused == 1
    await asyncio.sleep(1)
    assert kv_transfer_scene.load_of(dispatcher, "p0")["kv_refused"] == 1
    assert cluster.engine("d0").load().prefilled_tokens == 51


@pytest.mark.parametrize(("local_tokens_max", "is_remote"), [(None, False), (50, False), (49, True)])
def test_prompts_too_long_for_decode_workers_are_computed_apart_whatever_that_takes(
    local_tokens_max, is_remote
):
    config = DisaggConfig(remote_tokens_min=4, local_tokens_max=local_tokens_max, kv_transfer_s=9)
    router = RouterConfig(policy="kv", disagg=config)

    async def scene(_cluster, dispatcher):
        found = await answer(dispatcher, request("a", 50))
        assert found == await expected(request("a", 50))
        (first, *_) = dispatcher.explain("a")
        assert first.prefill.remote is is_remote
        assert first.prefill.local < first.prefill.prefill + first.prefill.decode

    run_scenario(scene, router=router)


@pytest.mark.parametrize("transfer_id", [b"", bytes(15), bytes(17), bytes(1 << 19)], ids=len)
def test_a_transfer_id_of_another_length_than_16_bytes_is_no_message(transfer_id):
    """Followers of transfers that never come are kept for a while: each costs as much as its id is long."""
    with pytest.raises(msgspec.ValidationError):
        PIN_MESSAGES.decode(encode(PinFollow(transfer_id=transfer_id, read_id=1)))


@run_by(kv_transfer_scene.run_scenario)
async def test_hashes_that_are_none_end_nobody_elses_connection(cluster, dispatcher):
    """One hash has 16 bytes; what a broken frontend sends is its own request's fate."""

    await answer(dispatcher, request("a"))
    worker, sink = cluster.worker("d0"), Sink()
    worker.connected(sink)
    hashes = bytes(3 * 16 + 8)
    source = cluster.worker("p0").kv_transfer.exchange.source
    prefetch = Prefetch(RequestId("b"), hashes, bytes(16), WorkerId(1), source)
    worker.prefetch(prefetch, sink)
    assert len(worker.kv_transfer) == 0
    handle = KvHandle(
        prefill_worker=WorkerId(1),
        pin_id=PinId(1),
        ttl_s=1.0,
        num_tokens=12,
        block_ids=bytes(12),
        source=source,
    )
    asked = msgspec.structs.replace(request("b", length=12), kv=handle, block_hashes=hashes)
    worker.submit(asked, sink)
    assert sink.error("b") == "invalid_request_error"
    worker.disconnected(sink)
