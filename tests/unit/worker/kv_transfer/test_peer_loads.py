"""A session that moves to another worker: what the first one has of it is loaded from there, as far as that is sooner."""

import asyncio

import msgspec
import pytest

from penstock.core.ids import WorkerId
from penstock.core.types.kv.exchange import KvAccess, KvPeer
from penstock.core.wire import encode
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.worker.config import KvTransferConfig, WorkerConfig
from penstock.worker.kv_transfer.exports import KvExports
from penstock.worker.kv_transfer.pin_messages import PinAsk
from tests.support.kv_transfer import SlowTransport, connect_late, tiny_engine, tiny_request, whole_answer
from tests.support.kv_transfer_scene import run_scenario
from tests.support.scenes import run_by

TOKEN_S = 1e-3
BLOCK_BYTES = 64
FULL_BLOCKS = 12  # of 50 tokens in blocks of 4, less the last token


def peers_scene(scene, *, delay_s=lambda _bytes: 1e-4, link_bytes_per_s=1e9, **fields):
    """Run a scene on two aggregated workers that get requests in turn; a prompt token takes `TOKEN_S`, as they have measured."""

    async def measured(cluster, dispatcher):
        for name in cluster.names:
            cluster.engine(name)._prefix_loads._compute_s = lambda new, _cached: new * TOKEN_S
        await scene(cluster, dispatcher)

    run_scenario(
        measured,
        ("a0", "a1"),
        router=RouterConfig(policy="round-robin", disagg=DisaggConfig(link_bytes_per_s=link_bytes_per_s)),
        transport=lambda: SlowTransport(delay_s),
        config=WorkerConfig(kv_transfer=KvTransferConfig(**{"peers": True, **fields})),
        engine=lambda _name: tiny_engine(kv_bytes=BLOCK_BYTES),
    )


def loads(cluster):
    return [cluster.worker(name).kv_transfer.peer_loads for name in cluster.names]


def loaded(cluster):
    return sum(each.loaded_tokens for each in loads(cluster))


def failures(cluster):
    return sum(each.failures for each in loads(cluster))


async def first_answer(dispatcher):
    """Have one worker compute the prompt, and the router hear of it."""
    answer = await whole_answer(dispatcher, tiny_request("first"))
    await asyncio.sleep(1.0)
    return answer


@run_by(peers_scene)
async def test_a_session_that_moves_loads_its_prefix_from_the_worker_that_had_it(cluster, dispatcher):
    first = await first_answer(dispatcher)
    again = await whole_answer(dispatcher, tiny_request("again"))
    assert again[0] == first[0]
    assert (first[2], again[2]) == (0, 4 * FULL_BLOCKS)
    assert (loaded(cluster), failures(cluster)) == (4 * FULL_BLOCKS, 0)
    await asyncio.sleep(1.0)
    shown = [worker.load["peer_tokens"] for worker in dispatcher.workers()]
    assert sorted(shown) == [0, 4 * FULL_BLOCKS]
    assert not any(cluster.worker(name).kv_transfer.exports for name in cluster.names), (
        "nothing is lent any more"
    )
    third = await whole_answer(dispatcher, tiny_request("third"))
    assert third[0] == first[0]
    assert loaded(cluster) == 4 * FULL_BLOCKS, "both have it now"


@run_by(peers_scene)
async def test_a_peer_that_does_not_answer_is_done_without(cluster, dispatcher):
    first = await first_answer(dispatcher)
    for name in cluster.names:
        connect_late(cluster.worker(name), 3600.0)
    began_s = asyncio.get_running_loop().time()
    again = await whole_answer(dispatcher, tiny_request("again"))
    assert (again[0], again[2], failures(cluster)) == (first[0], 0, 1)
    assert asyncio.get_running_loop().time() - began_s < 1.0


@pytest.mark.parametrize("share", [0.0001, 0.03])
def test_no_more_is_lent_than_may_be_pinned(share):
    async def scene(cluster, dispatcher):
        first = await first_answer(dispatcher)
        again = await whole_answer(dispatcher, tiny_request("again"))
        assert again[0] == first[0]
        assert again[2] == 4 * int(200 * share)

    peers_scene(scene, pinned_share_max=share)


@run_by(peers_scene)
async def test_hashes_that_are_none_are_answered_with_nothing(cluster, dispatcher):
    await first_answer(dispatcher)
    await whole_answer(dispatcher, tiny_request("again"))  # they are connected now
    one, other = (cluster.worker(name).kv_transfer for name in cluster.names)
    for payload in (b"", bytes(15), bytes(16 * 3 + 1)):
        one._agent.send_notification(other._agent.name, encode(PinAsk(block_hashes=payload, read_id=9)))
        other._agent.send_notification(one._agent.name, encode(PinAsk(block_hashes=payload, read_id=9)))
    await asyncio.sleep(0.1)
    assert not other.exports
    assert not one.exports


@run_by(peers_scene)
async def test_a_made_up_peer_is_computed_without(cluster, dispatcher):
    name = cluster.names[0]
    worker, submitted = cluster.worker(name), []
    peer = KvPeer(worker_id=WorkerId(77), num_blocks=10_000, source=KvAccess(agent=b"nonsense"), block_s=1e-6)
    hashes = bytes(16 * FULL_BLOCKS)
    request = msgspec.structs.replace(tiny_request("r"), peer=peer, block_hashes=hashes)
    assert worker.kv_transfer.peer_loads.begin(request, submitted.append)
    await asyncio.sleep(1.0)
    assert submitted == [request]
    assert failures(cluster) == 1


def probes(cluster):
    return sum(len(each._probed_s) for each in loads(cluster))


@run_by(peers_scene, link_bytes_per_s=None)
async def test_a_worker_that_nobody_has_measured_is_measured_while_its_blocks_are_computed(
    cluster, dispatcher
):
    first = await first_answer(dispatcher)
    again = await whole_answer(dispatcher, tiny_request("again"))
    assert (again[0], again[2]) == (first[0], 0), "no request waits for a speed that nobody knows"
    assert (loaded(cluster), probes(cluster)) == (0, 1)
    await asyncio.sleep(1.0)
    other = await whole_answer(dispatcher, tiny_request("other", seed=5))
    await asyncio.sleep(1.0)
    moved = await whole_answer(dispatcher, tiny_request("moved", seed=5))
    assert (moved[0], moved[2]) == (other[0], 4 * FULL_BLOCKS)
    assert (loaded(cluster), probes(cluster)) == (4 * FULL_BLOCKS, 1)


def test_a_slow_network_costs_no_request_anything_and_is_measured_again():
    async def scene(cluster, dispatcher):
        for number in range(6):
            await whole_answer(dispatcher, tiny_request(f"one{number}", seed=number))
            await asyncio.sleep(6.0)
            began_s = asyncio.get_running_loop().time()
            again = await whole_answer(dispatcher, tiny_request(f"again{number}", seed=number))
            assert again[2] == 0
            took_s.append(asyncio.get_running_loop().time() - began_s)
        probed.append([each._speeds.of(WorkerId(1)).is_known for each in loads(cluster)])
        assert (loaded(cluster), failures(cluster)) == (0, 0)

    took_s, probed = [], []
    peers_scene(scene, delay_s=lambda _bytes: 0.5, link_bytes_per_s=None)
    with_peers, took_s = took_s, []
    peers_scene(scene, delay_s=lambda _bytes: 0.5, link_bytes_per_s=None, peers=False)
    assert with_peers == pytest.approx(took_s)
    assert any(probed[0])
    assert not any(probed[1])


@run_by(peers_scene)
async def test_a_worker_that_did_not_answer_is_measured_before_it_is_asked_again(
    cluster, dispatcher, *, monkeypatch
):
    await first_answer(dispatcher)
    with monkeypatch.context() as patched:
        patched.setattr(KvExports, "lend", lambda *_about: None)
        await whole_answer(dispatcher, tiny_request("again"))
    assert failures(cluster) == 1
    assert sum(len(each._speeds.doubted) for each in loads(cluster)) == 1
    for number in range(2):
        await whole_answer(dispatcher, tiny_request(f"other{number}", seed=5))
        await asyncio.sleep(1.0)
    assert (loaded(cluster), probes(cluster)) == (0, 1), "computed, and measured meanwhile"
    for number in range(2):
        await whole_answer(dispatcher, tiny_request(f"third{number}", seed=6))
        await asyncio.sleep(1.0)
    assert loaded(cluster) == 4 * FULL_BLOCKS
