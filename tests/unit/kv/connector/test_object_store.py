"""Two workers' KV connectors over one object store, of a model with two groups that have a window beside one over the whole context."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import pytest
from obstore.store import MemoryStore

from penstock.core.types.events import AllBlocksCleared, BlockStored, Holder, KvEvent, Tier
from penstock.core.types.instances import KvHolder
from penstock.core.wire import HashArray, hash_list
from penstock.kv.block_store import Namespace
from penstock.kv.connector.staging import Staging
from penstock.kv.object_packs import ObjectPacks
from penstock.kv.pack_index import PacksConfig
from penstock.kv.stored_tier import StoredTier
from penstock.seams.kv import KvTier
from tests.support.connected import BLOCK_BYTES, BLOCK_SIZE
from tests.unit.kv.connector.test_grouped import Grouped

NAMESPACE = Namespace(model_digest="m", dtype="f", layout="l", block_size=BLOCK_SIZE)
NEEDED = 8 + 2 + 1
"""Blocks that a prompt of 8 takes in all groups."""


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(store: MemoryStore) -> Iterator[Callable[[], Grouped]]:
    made = []

    def tiers(staging: Staging) -> Sequence[KvTier]:
        config = PacksConfig(gather_s=0.0, pack_bytes=4 * BLOCK_BYTES)
        packs = ObjectPacks(store, BLOCK_BYTES, NAMESPACE, config)
        return [
            StoredTier(
                packs,
                Tier.OBJECT,
                staging.blocks,
                100,
                shared=KvHolder(kind=Holder.FLEET, id="store", blocks=100),
            )
        ]

    def make() -> Grouped:
        made.append(Grouped(tiers=tiers))
        return made[-1]

    yield make
    for each in made:
        each.close()


def on_its_loop(scene: Grouped, ask: Callable[[StoredTier], bool], *, is_heard: bool = True) -> None:
    """Wait until a worker's tier says yes; `is_heard`: and the scheduler hears of it."""
    worker = scene.workers[0]
    tier = worker.tiers[0]
    assert isinstance(tier, StoredTier)

    async def wait() -> None:
        async with asyncio.timeout(30):
            while not ask(tier):  # noqa: ASYNC110 - a store of memory answers at once
                await asyncio.sleep(0)
        worker._tell()

    worker._call(wait())
    if is_heard:
        scene.step()


def keeps(scene: Grouped, num_blocks: int) -> None:
    on_its_loop(scene, lambda tier: tier.num_cached == num_blocks)


def lists(scene: Grouped, num_blocks: int, *, is_heard: bool = True) -> None:
    worker = scene.workers[0]
    tier = worker.tiers[0]
    assert isinstance(tier, StoredTier)
    packs = tier._store
    assert isinstance(packs, ObjectPacks)
    worker._call(packs.refresh())
    on_its_loop(scene, lambda tier: tier.num_cached == num_blocks, is_heard=is_heard)


def load_whole(scene: Grouped, hashes: HashArray) -> None:
    """Load a prompt; on a busy machine a load is late and given up, and the next request loads what is missing."""
    for number in count():
        found = scene.load(f"load {number}", hashes)
        if found == len(hashes) and not scene.reports[-1].loaded[0].missing:
            return


def test_another_worker_loads_the_last_windows_from_the_store(make: Callable[[], Grouped]) -> None:
    one, other = make(), make()
    hashes = one.keep_grouped(1, 8, ends=[8])
    keeps(one, NEEDED)
    assert other.load("a", hashes) == 0
    lists(other, NEEDED)
    load_whole(other, hashes)
    assert other.loaded(1, 8, 0, 8)
    (counts,) = other.scheduler.counts()
    assert counts.tier is Tier.OBJECT
    assert counts.loaded_blocks >= NEEDED


def told(events: Sequence[KvEvent]) -> set[int]:
    names: set[int] = set()
    for event in events:
        assert isinstance(event, BlockStored)
        assert (event.tier, event.holder) == (Tier.OBJECT, Holder.FLEET)
        names.update(hash_list(event.block_hashes))
    return names


def test_who_clears_its_cache_forgets_the_fleets_blocks_and_lists_them_again(
    make: Callable[[], Grouped],
) -> None:
    scene = make()
    hashes = scene.keep_grouped(1, 8, ends=[8])
    keeps(scene, NEEDED)
    scene.scheduler.take_events()
    scene.scheduler.clear()
    scene.step()
    assert scene.scheduler.take_events() == [AllBlocksCleared(holder=Holder.FLEET)]
    assert scene.load("a", hashes) == 0
    lists(scene, NEEDED)
    assert told(scene.scheduler.take_events()) == set(hashes[:, 0].tolist())
    load_whole(scene, hashes)


def test_a_step_is_asked_for_now_and_then_where_others_store_too(make: Callable[[], Grouped]) -> None:
    scene = make()
    assert not scene.scheduler.needs_steps
    scene.now_s += 0.3
    assert scene.scheduler.needs_steps
    scene.step()
    assert not scene.scheduler.needs_steps


def test_the_first_request_after_a_pause_waits_for_what_others_have_stored(
    make: Callable[[], Grouped],
) -> None:
    one, other = make(), make()
    hashes = one.keep_grouped(1, 8, ends=[8])
    keeps(one, NEEDED)
    lists(other, NEEDED, is_heard=False)
    other.now_s += 1.5
    assert other.scheduler.match("a", hashes, 0, 100) is None
    other.step()
    assert other.scheduler.match("a", hashes, 0, 100) == 8
    other.now_s += 1.5
    assert other.scheduler.match("b", hashes, 0, 100) is None
    other.now_s += 0.11
    assert other.scheduler.match("b", hashes, 0, 100) == 8, "no report came"
