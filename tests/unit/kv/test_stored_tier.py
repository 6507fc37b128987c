"""A tier over a store that fails or hangs: blocks are missing, nothing is wrong, and the store is not used for a while."""

import asyncio

import numpy as np

from penstock.core.errors import TransferError
from penstock.core.types.events import Tier
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.stored_tier import StoredTier
from penstock.testing.kv_source import load_into
from penstock.testing.kv_tier import BLOCK_BYTES, Stage, chain
from penstock.testing.loop import run_async


class Store:
    """Claims to have everything; loads hang, fail or answer."""

    num_mismatched = 0

    def __init__(self):
        self.mode = "hang"
        self.is_closed = False

    def locate(self, block_hashes):
        return len(block_hashes)

    async def load(self, block_hashes, targets, *, timeout_s=None):
        if self.mode == "hang":
            await asyncio.Event().wait()
        if self.mode == "fail":
            raise TransferError("the disk is gone")
        return len(targets)

    async def store(self, block_hashes, sources, *, parent=None, timeout_s=None, on_copied=None):
        return len(sources)

    def take_events(self):
        return ()

    def clear(self):
        pass

    async def close(self):
        self.is_closed = True


async def late(stage):
    done = asyncio.get_running_loop().create_future()
    load = stage.tier.load(chain(1, 4), [0, 1, 2, 3], done.set_result)
    await asyncio.sleep(0)
    load.cancel(is_late=True)
    load.cancel(is_late=True)
    return await done


def staged(scenario):
    async def main():
        memory = np.zeros((8, BLOCK_BYTES), np.uint8)
        store = Store()
        tier = StoredTier(store, Tier.DISK, DeviceBlocks(memory.ctypes.data, BLOCK_BYTES, memory), 8)
        await scenario(Stage(tier, memory), store)
        await tier.close()
        assert store.is_closed

    run_async(main())


async def test_a_store_that_hangs_is_turned_off_after_a_few_late_loads():
    async with staged() as (stage, store):
        for _ in range(3):
            assert stage.tier.locate(chain(1, 4)) == 4
            assert await late(stage) == 0
        assert stage.tier.locate(chain(1, 4)) == 0
        assert stage.tier.offload(chain(2, 4), [0, 1, 2, 3], print) == ()


async def test_loads_cancelled_for_other_reasons_say_nothing_about_the_store():
    async with staged() as (stage, store):
        for _ in range(10):
            assert await load_into(stage.tier, chain(1, 4), [0, 1, 2, 3], cancels=True) == 0
        assert stage.tier.locate(chain(1, 4)) == 4


async def test_a_store_that_fails_brings_no_blocks_and_is_turned_off():
    async with staged() as (stage, store):
        store.mode = "fail"
        assert [await stage.load(chain(1, 4), [0, 1, 2, 3]) for _ in range(3)] == [0, 0, 0]
        assert stage.tier.locate(chain(1, 4)) == 0


class Timed(Store):
    """Has blocks to measure loads with."""

    def __init__(self):
        super().__init__()
        self.mode = "answer"
        self.loads = 0
        self.storing_room = 100

    def start(self, on_change, on_failed):
        self.on_change, self.on_failed = on_change, on_failed

    def newest(self, count):
        return chain(1, 4)[:count]

    async def load(self, block_hashes, targets, *, timeout_s=None):
        self.loads += 1
        await asyncio.sleep(0.001)
        return await super().load(block_hashes, targets, timeout_s=timeout_s)


def timed(scenario):
    async def main():
        memory = np.zeros((8, BLOCK_BYTES), np.uint8)
        store = Timed()
        tier = StoredTier(store, Tier.DISK, DeviceBlocks(memory.ctypes.data, BLOCK_BYTES, memory), 8)
        tier.start(lambda: None)
        await scenario(tier, store)
        await tier.close()

    run_async(main())


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0.001)


async def test_the_speed_of_loads_is_known_before_a_request_has_loaded(monkeypatch):
    async with timed() as (tier, store):
        assert tier.load_s(4) == 0
        await turns()
        assert tier.load_s(4) > 0
        assert store.loads == 1
        for _ in range(5):
            tier.load_s(4)
        await turns()
        assert store.loads == 1, "it was measured a moment ago"
        monkeypatch.setattr("penstock.kv.stored_tier._SAMPLE_S", 0.0)
        done = asyncio.get_running_loop().create_future()
        tier.load(chain(1, 4), [0, 1, 2, 3], done.set_result)
        await done
        tier.load_s(4)
        await turns()
        assert store.loads == 3, "old measurements are made again in the background"


async def test_a_store_that_cannot_be_reached_at_the_start_is_off_at_once(capsys):
    async with timed() as (tier, store):
        store.on_failed(TransferError("no such bucket"))
        assert tier.is_off
        assert tier.offload_room == 0
        store.on_failed(TransferError("no such bucket"))
    assert "".join(capsys.readouterr()).count("kv_tier_off") == 1


async def test_it_takes_no_more_than_it_writes_in_two_seconds():
    async with timed() as (tier, store):
        store.storing_room = 10_000
        assert tier.offload_room == 10_000
        tier._store_speed.measure(100, 1.0)
        assert tier.offload_room == 200
        tier._storing_blocks = 150
        assert tier.offload_room == 50
        tier._store_speed.measure(100_000, 1e6)
        tier._storing_blocks = 0
        assert tier.offload_room == 32, "a slow store still gets a few"
