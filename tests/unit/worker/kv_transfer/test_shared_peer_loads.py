"""Requests with one prefix that arrive while it is loaded from another worker wait for that load."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest

from penstock.core.errors import PinExpired
from penstock.core.hashing import block_hashes
from penstock.core.wire import pack_hashes, unpack_tokens
from penstock.worker.kv_transfer import peer_source
from penstock.worker.kv_transfer.reader import Reader
from tests.support.kv_transfer import BLOCK_SIZE, tiny_request, whole_answer
from tests.support.scenes import run_by
from tests.unit.worker.kv_transfer.test_peer_loads import (
    BLOCK_BYTES,
    FULL_BLOCKS,
    failures,
    first_answer,
    loaded,
    peers_scene,
)

CHUNK_S = 2e-3


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    """Have a load take six chunks."""
    monkeypatch.setattr(peer_source, "_CHUNK_BYTES", 2 * BLOCK_BYTES)


def chunks_scene(scene):
    async def limited(cluster, dispatcher):
        async with asyncio.timeout(30.0):
            await scene(cluster, dispatcher)

    peers_scene(limited, delay_s=lambda _bytes: CHUNK_S)


async def until(condition):
    while not condition():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(1e-3)


async def opened(stack, dispatcher, name, **fields):
    """Open a request at the worker that lacks the prompt, then one at the worker that has it."""
    stream = await stack.enter_async_context(dispatcher.open(tiny_request(name, **fields)))
    await stack.enter_async_context(dispatcher.open(tiny_request(f"{name} there")))
    return stream


async def rest(stream):
    """Read an answer; returns its tokens and how many of its prompt were cached."""
    tokens, cached = [], None
    async for delta in stream:
        tokens += unpack_tokens(delta.token_ids).tolist()
        cached = delta.cached_tokens if cached is None else cached
    return tokens, cached


def waiting(cluster):
    return max(len(cluster.worker(name).kv_transfer.peer_loads) for name in cluster.names)


@run_by(chunks_scene)
async def test_three_requests_load_their_prefix_once(cluster, dispatcher):
    first = await first_answer(dispatcher)
    answers = await asyncio.gather(
        *(whole_answer(dispatcher, tiny_request(f"again{number}")) for number in range(6))
    )
    assert all(answer[0] == first[0] for answer in answers)
    assert [answer[2] for answer in answers] == [4 * FULL_BLOCKS] * 6
    assert (loaded(cluster), failures(cluster)) == (4 * FULL_BLOCKS, 0)


@pytest.mark.parametrize("leaves", [0, 1], ids=["who began it", "who joined"])
@run_by(chunks_scene)
async def test_a_load_goes_on_for_the_one_that_still_waits(cluster, dispatcher, *, leaves):
    await first_answer(dispatcher)
    async with AsyncExitStack() as stack:
        stacks = [await stack.enter_async_context(AsyncExitStack()) for _ in range(2)]
        streams = [await opened(each, dispatcher, f"r{n}") for n, each in enumerate(stacks)]
        await until(lambda: waiting(cluster) == 2 and loaded(cluster) >= 8)
        await stacks[leaves].aclose()
        _, cached = await rest(streams[1 - leaves])
        assert cached == 4 * FULL_BLOCKS
        assert (loaded(cluster), failures(cluster)) == (4 * FULL_BLOCKS, 0)


@pytest.mark.parametrize("error", [OSError("the network is gone"), PinExpired("they were evicted")])
@run_by(chunks_scene)
async def test_what_breaks_off_is_computed_by_all_who_waited(cluster, dispatcher, *, monkeypatch, error):
    original, reads = Reader.read, []

    async def read(self, *about):
        reads.append(about)
        await original(self, *about)
        if len(reads) > 2:
            raise error

    first = await first_answer(dispatcher)
    with monkeypatch.context() as patched:
        patched.setattr(Reader, "read", read)
        answers = await asyncio.gather(
            *(whole_answer(dispatcher, tiny_request(f"again{number}")) for number in range(4))
        )
    assert all(answer[0] == first[0] for answer in answers)
    assert failures(cluster) == 1
    assert loaded(cluster) == 2 * 8
    assert len(reads) == 4, "two chunks were under way; nobody has tried again"


@run_by(chunks_scene)
async def test_who_needs_more_than_the_load_brings_loads_the_rest_afterwards(cluster, dispatcher):
    longer = await whole_answer(dispatcher, tiny_request("first", 100))
    await asyncio.sleep(1.0)
    async with AsyncExitStack() as stack:
        short, long = [await opened(stack, dispatcher, f"r{length}", length=length) for length in (50, 100)]
        await until(lambda: waiting(cluster) == 2)
        (tokens, cached), (_, short_cached) = await asyncio.gather(rest(long), rest(short))
    assert (short_cached, cached) == (4 * FULL_BLOCKS, 96)
    assert tokens == longer[0]
    assert (loaded(cluster), failures(cluster)) == (96, 0)


@run_by(chunks_scene)
async def test_a_request_that_names_no_lender_waits_for_the_load_too(cluster, dispatcher):
    """Its router heard that this worker has the first blocks of the load, which goes on."""

    await first_answer(dispatcher)
    async with AsyncExitStack() as stack:
        await opened(stack, dispatcher, "r")
        await until(lambda: waiting(cluster) == 1 and loaded(cluster) >= 8)
        reader = max(
            (cluster.worker(name).kv_transfer.peer_loads for name in cluster.names),
            key=len,
        )
        asked = tiny_request("joins")
        hashes = pack_hashes(block_hashes(asked.token_ids, BLOCK_SIZE))
        submitted = []
        joins = msgspec.structs.replace(asked, block_hashes=hashes)
        assert reader.begin(joins, submitted.append)
        other = msgspec.structs.replace(tiny_request("other", seed=3), block_hashes=bytes(len(hashes)))
        assert not reader.begin(other, submitted.append), "nothing of it is under way"
        await until(lambda: submitted)
        assert submitted == [joins]
        assert (loaded(cluster), failures(cluster)) == (4 * FULL_BLOCKS, 0)
