"""Loads of a device process, over tiers that fail."""

from collections.abc import Callable, Sequence

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.connector.loads import Loads
from penstock.kv.connector.staging import Staging
from tests.support.connected import hashes_of
from tests.support.held_tier import HeldLoad, HeldTier


class BrokenTier(HeldTier):
    """Says that it has blocks, and cannot begin to load them."""

    def load(
        self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]
    ) -> HeldLoad:
        raise RuntimeError("no thread")


async def test_blocks_that_a_tier_fails_to_load_take_no_slots() -> None:
    hashes, staging = hashes_of(1, 3), Staging(HeldTier.block_bytes, 32 * 16)

    async def write(targets: Sequence[int], slots: Sequence[BlockId]) -> None:
        raise AssertionError("there is nothing to write")

    loads = Loads([BrokenTier(hashes[:, 0].tolist())], staging, write)
    free = staging.loads.take_now(99)
    staging.loads.give_back(free)
    assert (await loads.hold(hashes)).slots == []
    assert sorted(staging.loads.take_now(99)) == sorted(free)
    staging.close()
