"""What a router tells other regions of the prefixes here, and what it makes of what they tell."""

import asyncio

import msgspec
import numpy as np
import pytest

from penstock.core.hashing import block_hashes, root_hash
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from penstock.core.types.kv import CHUNK_TOKENS, PrefixSummary, chunk_hashes, pack_root
from penstock.core.types.load import LinkReport, WorkerLoad
from penstock.core.wire import pack_hashes, unpack_hashes
from penstock.router.config import PrefixSummaryConfig, RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine
from tests.support.scene import Engines, make_request, run_scenario, stored
from tests.support.scenes import scenes

BLOCK = 4
PROMPT = tuple(range(1, 1 + 3 * CHUNK_TOKENS + 5))
HASHES = block_hashes(PROMPT, BLOCK, b"tiny-1")[:, 0]
CHUNKS = chunk_hashes(HASHES, BLOCK)


def engine(**info: object) -> ManualEngine:
    made = ManualEngine()
    made.info = msgspec.structs.replace(made.info, context_length=4096, total_blocks=2000, **info)
    return made


def told(chunks: np.ndarray, size: int = CHUNK_TOKENS) -> BlockStored:
    return BlockStored(block_hashes=pack_hashes(chunks), parent_block_hash=None, block_size=size)


async def route(dispatcher: Dispatcher, request_id: str) -> tuple[str, dict[str, int]]:
    """Open and leave a request; give who got it, and the blocks that each worker is taken to hold."""
    async with dispatcher.open(make_request(request_id, PROMPT)):
        decision = dispatcher.latest_decisions(1)[-1]
        return decision.worker, {each.worker: each.overlap_blocks for each in decision.candidates}


class Link(ManualEngine):
    """Measures what a test says."""

    round_trip_s = 0.0

    def load(self) -> WorkerLoad:
        link = LinkReport(region="eu", frontends=1, healthy=1, round_trip_s=self.round_trip_s)
        return msgspec.structs.replace(super().load(), link=link)


@pytest.mark.virtual
async def test_a_region_attracts_requests_whose_prefix_it_tells_of_and_no_others():
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        elsewhere, here = Link(engine(is_deployment=True).info), engine()
        elsewhere.round_trip_s = 1.0  # so far that no prefix is worth the way
        await cluster.start("elsewhere", elsewhere)
        await cluster.start("here", here)
        await asyncio.sleep(0.01)
        steps: list[tuple[KvEvent, int]] = [
            (told(CHUNKS[1:2]), 0),  # nothing after the first that is missing
            (BlockRemoved(block_hashes=pack_hashes(CHUNKS[1:2])), 0),
            (told(CHUNKS[:1]), 1),
            (told(CHUNKS), 3),
            (AllBlocksCleared(), 0),
        ]
        here.step(events=[stored(HASHES[:100])])
        for number, (event, chunks) in enumerate(steps):
            elsewhere.step(events=[event])
            await asyncio.sleep(2.0)  # load reports have a pace
            worker, blocks = await route(dispatcher, f"r{number}")
            assert (worker, blocks) == ("here", {"elsewhere": chunks * CHUNK_TOKENS // BLOCK, "here": 100})
            dispatcher.check()
        elsewhere.round_trip_s = 0.0
        elsewhere.step(events=[told(CHUNKS)])
        await asyncio.sleep(2.0)
        assert await route(dispatcher, "a") == ("elsewhere", {"elsewhere": 192, "here": 100})


def run_big(scene, config: RouterConfig) -> None:
    """Run a scene with engines that take long prompts."""

    async def with_room(cluster: MemoryCluster, dispatcher: Dispatcher, engines: Engines) -> None:
        for name in ("w1", "w2"):
            engines[name] = engine()
            await cluster.start(name, engines[name])
        await asyncio.sleep(0.01)
        await scene(cluster, dispatcher, engines)

    run_scenario(with_room, num_workers=0, config=config)


in_a_big_scene = scenes(run_big, 3)


TELLING = RouterConfig(prefix_summary=PrefixSummaryConfig(bytes_per_s=64_000))


@in_a_big_scene(TELLING)
async def test_a_router_tells_of_hot_prefixes_that_its_workers_hold_once_somebody_asks(
    cluster, dispatcher, engines
):
    def ask(after: dict[int, int], cache_salt: str = "") -> PrefixSummary:
        summary = dispatcher.prefix_summary("tiny", cache_salt, after, 1.0)
        assert summary is not None
        return summary

    await route(dispatcher, "nobody asks")
    first = ask({})
    assert first.root == pack_root(root_hash(BLOCK, b"tiny-1"))
    assert (first.chunk_tokens, first.since, first.version, first.added) == (256, 0, 0, b"")
    await route(dispatcher, "noted")
    await asyncio.sleep(1.0)
    assert not ask({}).added, "nobody holds it"
    engines["w2"].step(events=[stored(HASHES)])
    await asyncio.sleep(1.0)
    second = ask({first.origin: first.version})
    assert unpack_hashes(second.added).tolist() == CHUNKS.tolist()
    assert ask({first.origin: second.version}).added == b""

    async with dispatcher.open(
        msgspec.structs.replace(make_request("salted", PROMPT), salt=b"tiny-1|cache_salt=x")
    ):
        pass
    salted = block_hashes(PROMPT, BLOCK, b"tiny-1|cache_salt=x")[:, 0]
    engines["w2"].step(events=[stored(salted)])
    await asyncio.sleep(1.0)
    assert ask({first.origin: second.version}).added == b"", "salted prompts are nobody else's business"
    of_tenant = ask({}, cache_salt="t")
    assert of_tenant.root == pack_root(root_hash(BLOCK, b"tiny-1|cache_salt=t"))
    assert of_tenant.added == b""

    engines["w2"].step(events=[BlockRemoved(block_hashes=pack_hashes(HASHES[100:]))])
    await asyncio.sleep(1.0)
    third = ask({first.origin: second.version})
    assert unpack_hashes(third.removed).tolist() == CHUNKS[1:].tolist()[::-1], "children first"
    assert dispatcher.prefix_summary("other", "", {}, 1.0) is None
    await asyncio.sleep(100.0)
    await route(dispatcher, "long after")
    assert ask({}).added == b"", "nothing was noted while nobody asked"
