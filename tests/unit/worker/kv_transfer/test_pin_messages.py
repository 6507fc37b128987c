"""What peers say about pinned blocks, and what nobody of this deployment says."""

import asyncio

import msgspec
import pytest

from penstock.core.ids import PinId, RequestId, WorkerId
from penstock.core.types.requests import KvHandle, Prefetch
from penstock.core.wire import encode
from penstock.worker.kv_transfer.pin_messages import PIN_MESSAGES, PinFollow
from tests.support import kv_transfer_scene
from tests.support.kv_transfer import tiny_request, whole_answer
from tests.support.worker_stage import Sink

NO_IDS = (b"", bytes(15), bytes(17), bytes(1 << 19))
"""Transfer ids have 16 bytes."""


@pytest.mark.parametrize("transfer_id", NO_IDS, ids=len)
def test_a_transfer_id_of_another_length_is_no_message(transfer_id):
    with pytest.raises(msgspec.ValidationError):
        PIN_MESSAGES.decode(encode(PinFollow(transfer_id=transfer_id, read_id=1)))


def test_who_follows_what_is_no_transfer_id_is_not_remembered():
    """Followers of transfers that never come are kept for a while: each costs as much as its id is long."""

    async def scene(cluster, dispatcher):
        await whole_answer(dispatcher, tiny_request("a"))
        decode_worker, prefill_worker = (cluster.worker(name).kv_transfer for name in ("d0", "p0"))
        for transfer_id in (*NO_IDS, bytes(16)):
            payload = encode(PinFollow(transfer_id=transfer_id, read_id=1))
            decode_worker._agent.send_notification(prefill_worker._agent.name, payload)
        await asyncio.sleep(0.1)
        assert list(prefill_worker.exports._early) == [bytes(16)]

    kv_transfer_scene.run_scenario(scene)


def test_hashes_that_are_none_end_nobody_elses_connection():
    """One hash has 16 bytes; what a broken frontend sends is its own request's fate."""

    async def scene(cluster, dispatcher):
        await whole_answer(dispatcher, tiny_request("a"))
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
        asked = msgspec.structs.replace(tiny_request("b", length=12), kv=handle, block_hashes=hashes)
        worker.submit(asked, sink)
        assert sink.error("b") == "invalid_request_error"
        worker.disconnected(sink)

    kv_transfer_scene.run_scenario(scene)
