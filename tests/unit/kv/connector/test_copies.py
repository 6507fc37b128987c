"""Saves and loads of a device process, with tiers that a test holds, and tiers that fail."""

import asyncio
from collections.abc import Callable, Sequence

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.connector.loads import Loads
from penstock.kv.connector.offloads import Offloads
from penstock.kv.connector.orders import SaveOrder
from penstock.kv.connector.staging import Staging
from tests.support.connected import hashes_of
from tests.support.held_tier import HeldLoad, HeldTier

_TURNS = 20
"""Of the event loop: more than anything here takes."""


async def test_a_piece_waits_until_the_one_before_it_is_stored_and_not_only_read() -> None:
    tier, staging = HeldTier(), Staging(HeldTier.block_bytes, 32 * 16)
    at_once = 4
    hashes, read_ids = hashes_of(1, 3 * at_once), list[int]()

    async def read(block_ids: Sequence[int], slots: Sequence[BlockId]) -> None:
        read_ids.extend(block_ids)

    offloads = Offloads([tier], staging, read, on_begin=lambda: None, on_end=lambda: None)
    saving = asyncio.get_running_loop().create_task(
        offloads.save(SaveOrder(1, hashes, 0, list(range(100, 112))))
    )
    for number in range(3):
        await _turns()
        assert len(tier.offloads) == number + 1
        keys, block_ids, done = tier.offloads[-1]
        done(block_ids)
        await _turns()
        assert len(tier.offloads) == number + 1, "it has read the slots, and not stored the blocks"
        tier.keys |= set(keys)
        offloads.changed()
    await saving
    assert read_ids == list(range(100, 112))
    staging.close()


async def test_a_tier_that_raises_costs_its_blocks_and_holds_up_no_later_save() -> None:
    class BrokenTier(HeldTier):
        is_broken = True

        def offload(
            self,
            block_hashes: HashArray,
            block_ids: Sequence[BlockId],
            done: Callable[[Sequence[BlockId]], None],
        ) -> Sequence[BlockId]:
            if self.is_broken:
                raise RuntimeError("no thread")
            return super().offload(block_hashes, block_ids, done)

    tier, staging = BrokenTier(), Staging(HeldTier.block_bytes, 32 * 16)
    free = staging.saves.take_now(99)
    staging.saves.give_back(free)

    async def read(block_ids: Sequence[int], slots: Sequence[BlockId]) -> None:
        assert len(block_ids) == len(slots)

    offloads = Offloads([tier], staging, read, on_begin=lambda: None, on_end=lambda: None)
    await offloads.save(SaveOrder(1, hashes_of(1, 2), 0, [5, 6]))
    tier.is_broken = False
    async with asyncio.timeout(1):
        await offloads.save(SaveOrder(2, hashes_of(2, 2), 0, [7, 8]))
    tier.end_offload()
    assert tier.num_cached == 2
    assert sorted(staging.saves.take_now(99)) == sorted(free)
    staging.close()


async def _turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


class UnreadableTier(HeldTier):
    """Says that it has blocks, and cannot begin to load them."""

    def load(
        self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]
    ) -> HeldLoad:
        raise RuntimeError("no thread")


async def test_blocks_that_a_tier_fails_to_load_take_no_slots() -> None:
    hashes, staging = hashes_of(1, 3), Staging(HeldTier.block_bytes, 32 * 16)

    async def write(targets: Sequence[int], slots: Sequence[BlockId]) -> None:
        raise AssertionError("there is nothing to write")

    loads = Loads([UnreadableTier(hashes[:, 0].tolist())], staging, write)
    free = staging.loads.take_now(99)
    staging.loads.give_back(free)
    assert (await loads.hold(hashes)).slots == []
    assert sorted(staging.loads.take_now(99)) == sorted(free)
    staging.close()
