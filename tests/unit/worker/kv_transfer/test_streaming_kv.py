"""KV that moves while its prompt is computed: what it saves, and what is left of it whatever becomes of the request."""

import asyncio
from unittest import mock

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.ids import PinId
from penstock.core.types.instances import Role
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.sim.loop import run_virtual
from penstock.worker.config import KvTransferConfig, WorkerConfig
from penstock.worker.kv_transfer.reader import Growth, PinGrown
from tests.support import kv_transfer_scene
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import (
    SlowTransport,
    tiny_engine,
    tiny_request,
    whole_answer,
)
from tests.support.kv_transfer_scene import ALWAYS
from tests.support.scenes import run_by

CHUNK = 16
STEP_S = 0.01 + CHUNK * 1e-3
"""Of a chunk of a prompt."""
LENGTH = 200
BLOCKS = LENGTH // 4
EARLY_BLOCKS = LENGTH // CHUNK * CHUNK // 4
"""Those of all chunks but the last."""


def run_scenario(
    scene, names=("p0", "d0"), *, stream=True, byte_s=0.0, kv_blocks=None, router=ALWAYS, **limits
):
    limits = {"pinned_share_max": 1.0} | limits
    kv_transfer_scene.run_scenario(
        scene,
        names,
        router=router,
        engine=lambda name: tiny_engine((kv_blocks or {}).get(name, 200), chunk_tokens=CHUNK),
        transport=lambda: SlowTransport(lambda num_bytes: num_bytes * byte_s),
        config=WorkerConfig(kv_transfer=KvTransferConfig(stream_kv=stream, **limits)),
    )


def kv_transfer(cluster, name="d0"):
    return cluster.worker(name).kv_transfer


def held(cluster, name):
    return cluster.engine(name).load().active_blocks


def outcomes(cluster):
    value, name = cluster.registry.get_sample_value, "penstock_router_prefetches_total"
    return {each: value(name, {"outcome": each}) or 0 for each in ("used", "dropped")}


async def expected(asked):
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        await cluster.start("alone", tiny_engine(chunk_tokens=CHUNK))
        return await whole_answer(dispatcher, asked)


async def second_token_s(dispatcher, asked):
    """Time the second token from when the request was sent."""
    loop = asyncio.get_running_loop()
    begin_s, found = loop.time(), 0
    async with dispatcher.open(asked) as stream:
        async for delta in stream:
            found += len(unpack_tokens(delta.token_ids))
            if found >= 2:
                return loop.time() - begin_s
    raise AssertionError("no second token")


async def chunks(number):
    """Wait until about so many chunks are computed."""
    await asyncio.sleep((number + 0.5) * STEP_S)


def test_the_second_token_waits_for_the_last_chunk_and_not_for_the_whole_prompt():
    byte_s = 0.8 * STEP_S / (CHUNK // 4 * 64)  # the link is a little faster than the prompt is computed
    whole_s, last_s = BLOCKS * 64 * byte_s, CHUNK // 4 * 64 * byte_s
    found_s = {}

    def measure(names, stream):
        async def scene(_cluster, dispatcher):
            found_s[names, stream] = await second_token_s(dispatcher, tiny_request("a", LENGTH))

        run_scenario(scene, names, stream=stream, byte_s=byte_s)

    measure(("a0",), None)
    measure(("p0", "d0"), True)
    measure(("p0", "d0"), False)
    alone_s = found_s[("a0",), None]
    rest_s = 0.015  # a step of its own for what no full block holds
    assert found_s[("p0", "d0"), True] - alone_s <= last_s + rest_s
    assert found_s[("p0", "d0"), False] - alone_s >= whole_s
    assert whole_s > 10 * last_s


def test_the_router_prices_what_is_left_to_move():
    decode_s = {}
    router = RouterConfig(disagg=DisaggConfig(remote_tokens_min=1, link_bytes_per_s=64 * BLOCKS / 0.1))
    assert router.policy == "kv"

    def measure(stream):
        async def scene(_cluster, dispatcher):
            await whole_answer(dispatcher, tiny_request("a", LENGTH))
            decode_s[stream] = dispatcher.explain("a")[0].prefill.decode

        run_scenario(scene, stream=stream, router=router)

    measure(True)
    measure(False)
    last = LENGTH % CHUNK / LENGTH
    assert decode_s[False] - decode_s[True] == pytest.approx(100 * (1 - last), rel=0.01), "milliseconds"


@pytest.mark.parametrize(
    ("length", "tokens", "stream"), [(CHUNK, 20, True), (LENGTH, 1, True), (LENGTH, 20, False)]
)
def test_what_has_no_overlap_or_is_not_to_does_not_begin_early(length, tokens, stream):
    async def scene(cluster, dispatcher):
        await whole_answer(dispatcher, tiny_request("a", length, tokens))
        assert kv_transfer(cluster).incoming.early_blocks == 0
        assert kv_transfer(cluster).incoming.fetched_blocks == (length // 4 if tokens > 1 else 0)
        assert outcomes(cluster) == {"used": tokens > 1, "dropped": 0}

    run_scenario(scene, stream=stream)


@pytest.mark.parametrize("side", ["p0", "d0"])
@run_by(run_scenario)
async def test_a_preemption_ends_what_was_only_expected(cluster, dispatcher, *, side):
    async with dispatcher.open(tiny_request("a", LENGTH)) as stream:
        await chunks(3)
        kv_transfer(cluster, side).stepped(1)
        assert len(kv_transfer(cluster, "p0").exports) == (side == "d0")
        await asyncio.sleep(1e-3)
        assert held(cluster, "d0") == 0, "who reads is told"
        async for _ in stream:
            pass
    assert kv_transfer(cluster).incoming.fetched_blocks == BLOCKS
    assert kv_transfer(cluster).incoming.failures == {}


def test_an_engine_that_gives_blocks_only_at_the_end_is_refused():
    async def start(stream):
        async with MemoryCluster() as cluster:
            engine = tiny_engine()
            start = engine.start

            async def without():
                return msgspec.structs.replace(await start(), kv_by_chunk=False)

            engine.start = without
            config = WorkerConfig(kv_transfer=KvTransferConfig(stream_kv=stream))
            worker = await cluster.start("p0", engine, role=Role.PREFILL, config=config)
            return cluster.errors, worker.kv_transfer

    errors, _ = run_virtual(start(True))
    assert isinstance(errors["p0"], ConfigError)
    assert "stream_kv" in errors["p0"].message
    for stream in (None, False):
        errors, one = run_virtual(start(stream))
        assert not errors
        assert one.streams_kv is False


def grown(first, ids, *, is_whole=False):
    return PinGrown(pin_id=PinId(1), read_id=1, first=first, block_ids=pack_tokens(ids), is_whole=is_whole)


BYTES_OF_NO_ID = msgspec.structs.replace(grown(2, [7]), block_ids=b"abc")


@pytest.mark.parametrize("message", [grown(1, [7]), grown(3, [7]), grown(2, [7, 8]), BYTES_OF_NO_ID])
def test_what_a_prefill_worker_says_must_go_on_where_it_was(message):
    growth = Growth(num_blocks_max=3)
    growth.add(grown(0, [5, 6]))
    assert growth.error is None
    growth.add(message)
    assert growth.error.code == "protocol_error"


@run_by(run_scenario)
async def test_a_message_that_is_none_ends_no_worker(cluster, dispatcher):
    """What a prefill worker says wrongly is its own prompt's fate; what is no message at all is skipped."""

    prefill_worker, decode_worker = kv_transfer(cluster, "p0"), kv_transfer(cluster, "d0")
    tell = prefill_worker.exports._notify

    def say_it_wrongly(agent, message):
        if isinstance(message, PinGrown):
            message = msgspec.structs.replace(message, block_ids=b"abc")
        for payload in (b"", b"nonsense", b"\x91" * 100_000, b"\x81\xa4type\xa1\xff"):
            prefill_worker._agent.send_notification(agent, payload)
        tell(agent, message)

    prefill_worker.exports._notify = say_it_wrongly
    tokens, *_ = await whole_answer(dispatcher, tiny_request("a", LENGTH))
    assert tokens == (await expected(tiny_request("a", LENGTH)))[0]
    assert decode_worker.incoming.early_failures == {"protocol_error": 1}
    prefill_worker.exports._notify = tell
    with mock.patch.object(decode_worker._reader, "grown", side_effect=KeyError("a bug")):
        await whole_answer(dispatcher, tiny_request("b", LENGTH, seed=1))
    await whole_answer(dispatcher, tiny_request("c", LENGTH, seed=2))
    assert cluster.names == ["p0", "d0"]
    assert decode_worker.incoming.early_blocks == EARLY_BLOCKS
