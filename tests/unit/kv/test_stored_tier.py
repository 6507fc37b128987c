"""A tier over a store that fails or hangs: blocks are missing, nothing is wrong, and the store is not used for a while."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from penstock.core.errors import TransferError
from penstock.core.types.events import Tier
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.stored_tier import StoredTier
from penstock.testing.kv_source import load_into
from penstock.testing.kv_tier import BLOCK_BYTES, chain

BLOCKS = [0, 1, 2, 3]


class Store:
    """Claims to have everything; loads hang, fail or answer, and stores take `store_s`."""

    num_mismatched = 0
    storing_room = 100
    store_s = 0.0

    def __init__(self):
        self.mode = "answer"
        self.loads = 0
        self.is_closed = False

    def start(self, on_change, on_failed):
        self.on_failed = on_failed

    def newest(self, count):
        return chain(1, 4)[:count]

    def locate(self, block_hashes):
        return len(block_hashes)

    async def load(self, block_hashes, targets, *, timeout_s=None):
        self.loads += 1
        if self.mode == "hang":
            await asyncio.Event().wait()
        if self.mode == "fail":
            raise TransferError("the disk is gone")
        await asyncio.sleep(0.001)
        return len(targets)

    async def store(self, block_hashes, sources, *, parent=None, timeout_s=None, on_copied=None):
        await asyncio.sleep(self.store_s)
        return len(sources)

    def take_events(self):
        return ()

    async def close(self):
        self.is_closed = True


@asynccontextmanager
async def opened():
    memory, store = np.zeros((8, BLOCK_BYTES), np.uint8), Store()
    tier = StoredTier(store, Tier.DISK, DeviceBlocks(memory.ctypes.data, BLOCK_BYTES, memory), 8)
    yield tier, store
    await tier.close()
    assert store.is_closed


async def late(tier):
    done = asyncio.get_running_loop().create_future()
    load = tier.load(chain(1, 4), BLOCKS, done.set_result)
    await asyncio.sleep(0)
    load.cancel(is_late=True)
    load.cancel(is_late=True)
    return await done


async def test_a_store_that_hangs_is_turned_off_after_a_few_late_loads():
    async with opened() as (tier, store):
        store.mode = "hang"
        for _ in range(10):
            assert await load_into(tier, chain(1, 4), BLOCKS, cancels=True) == 0
        for _ in range(3):
            assert tier.locate(chain(1, 4)) == 4, "loads that were cancelled for other reasons say nothing"
            assert await late(tier) == 0
        assert tier.locate(chain(1, 4)) == 0
        assert tier.offload(chain(2, 4), BLOCKS, print) == ()


async def test_a_store_that_fails_brings_no_blocks_and_is_turned_off():
    async with opened() as (tier, store):
        store.mode = "fail"
        assert [await load_into(tier, chain(1, 4), BLOCKS) for _ in range(3)] == [0, 0, 0]
        assert tier.locate(chain(1, 4)) == 0


@pytest.mark.virtual
async def test_the_speed_of_loads_is_known_before_a_request_has_loaded():
    async with opened() as (tier, store):
        tier.start(lambda: None)
        assert tier.load_s(4) == 0
        await asyncio.sleep(0.5)
        for _ in range(5):
            assert tier.load_s(4) > 0
        await asyncio.sleep(0.4)
        assert store.loads == 1, "it was measured a moment ago"
        await asyncio.sleep(60)
        tier.load_s(4)
        await asyncio.sleep(0.5)
        assert store.loads == 2, "old measurements are made again in the background"


async def test_a_store_that_cannot_be_reached_at_the_start_is_off_at_once(capsys):
    async with opened() as (tier, store):
        tier.start(lambda: None)
        store.on_failed(TransferError("no such bucket"))
        assert tier.is_off
        assert tier.offload_room == 0
        store.on_failed(TransferError("no such bucket"))
    assert "".join(capsys.readouterr()).count("kv_tier_off") == 1


async def test_it_takes_no_more_than_it_writes_in_two_seconds():
    async with opened() as (tier, store):
        store.storing_room, store.store_s = 10_000, 0.05
        assert tier.offload_room == 10_000
        store.locate = lambda _: 0
        stored = asyncio.get_running_loop().create_future()
        assert tier.offload(chain(2, 4), BLOCKS, stored.set_result)
        await stored
        assert 32 <= tier.offload_room <= 4 * 2.0 / 0.05, "a slow store still gets a few"
