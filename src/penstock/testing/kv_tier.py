"""The conformance suite of `KvTier`: subclass it, make your tier over the given device memory, and run it with pytest."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.types.events import BlockRemoved, BlockStored
from penstock.core.wire import HashArray, unpack_hashes
from penstock.kv.device_blocks import DeviceBlocks
from penstock.seams.kv import KvTier
from penstock.testing.kv_source import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    DEVICE_BLOCKS,
    TIMEOUT_S,
    KvSourceSuite,
    Memory,
    begin,
    chain,
    load_into,
    random_blocks,
)
from penstock.testing.loop import run_async


class Stage:
    """A tier over device memory, with copies that are waited for."""

    def __init__(self, tier: KvTier, memory: Memory) -> None:
        self.tier = self.source = tier
        self.memory = memory

    def write(self, block_ids: Sequence[int], seed: int) -> Memory:
        """Fill device blocks with random bytes; returns a copy."""
        content = random_blocks(len(block_ids), seed)
        self.memory[list(block_ids)] = content
        return content

    async def offload(self, hashes: HashArray, block_ids: Sequence[int]) -> list[int]:
        """Offload and wait until the tier keeps all of them; returns the blocks that were read."""
        done: asyncio.Future[Sequence[BlockId]] = asyncio.get_running_loop().create_future()
        read = self.tier.offload(hashes, [BlockId(number) for number in block_ids], done.set_result)
        if read:
            async with asyncio.timeout(TIMEOUT_S):
                assert list(await done) == list(read), "done gets the blocks that offload returned"
                while self.tier.locate(hashes) < len(hashes):  # noqa: ASYNC110 - it may be kept after the copy
                    await asyncio.sleep(0.001)
        return list(read)

    async def put(self, hashes: HashArray, content: Memory) -> None:
        """Offload blocks with this content."""
        self.memory[: len(content)] = content
        await self.offload(hashes, range(len(content)))

    async def load(self, hashes: HashArray, targets: Sequence[int]) -> int:
        """Load and wait; returns the blocks that arrived."""
        return await load_into(self.tier, hashes, targets)


class KvTierSuite(KvSourceSuite):
    """What every `KvTier` must do."""

    def make_tier(self, device: DeviceBlocks, block_size: int) -> KvTier:
        """Make an empty tier for at least 32 blocks, or a few more."""
        raise NotImplementedError

    def source_stage(self) -> AbstractAsyncContextManager[Stage]:
        return self.stage()

    @asynccontextmanager
    async def stage(self) -> AsyncIterator[Stage]:
        memory = np.zeros((DEVICE_BLOCKS, BLOCK_BYTES), np.uint8)
        tier = self.make_tier(DeviceBlocks(memory.ctypes.data, BLOCK_BYTES, memory), BLOCK_SIZE)
        tier.start(lambda: None)
        try:
            yield Stage(tier, memory)
        finally:
            await tier.close()
            await tier.close()

    def run(self, scenario: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with self.stage() as stage:
                await scenario(stage)

        run_async(main(), timeout_s=TIMEOUT_S)

    def test_what_was_offloaded_is_loaded_byte_by_byte(self) -> None:
        async def scenario(stage: Stage) -> None:
            hashes, content = chain(1, 6), stage.write(range(6), 1)
            assert (stage.tier.locate(hashes), stage.tier.num_cached) == (0, 0)
            assert await stage.offload(hashes, range(6)) == list(range(6))
            assert (stage.tier.num_cached, stage.tier.block_bytes) == (6, BLOCK_BYTES)
            assert not stage.tier.is_off
            assert stage.tier.offload_room > 0
            stage.memory[:] = 0
            assert stage.tier.locate(hashes) == 6
            assert await stage.load(hashes, range(40, 46)) == 6
            np.testing.assert_array_equal(stage.memory[40:46], content)
            assert not stage.memory[:40].any()
            assert not stage.memory[46:].any()

        self.run(scenario)

    def test_only_what_it_lacks_is_read(self) -> None:
        async def scenario(stage: Stage) -> None:
            stage.write(range(6), 1)
            await stage.offload(chain(1, 4), range(4))
            assert await stage.offload(chain(1, 4), range(4)) == []
            assert await stage.offload(chain(1, 6), range(6)) == [4, 5]
            assert stage.tier.locate(chain(1, 6)) == 6

        self.run(scenario)

    def test_copies_side_by_side_do_not_mix(self) -> None:
        async def scenario(stage: Stage) -> None:
            contents = {seed: stage.write(range(8 * seed, 8 * seed + 8), seed) for seed in range(3)}
            await asyncio.gather(
                *(stage.offload(chain(10 + seed, 8), range(8 * seed, 8 * seed + 8)) for seed in range(3))
            )
            stage.memory[:] = 0
            counts = await asyncio.gather(
                *(stage.load(chain(10 + seed, 8), range(30 + 8 * seed, 38 + 8 * seed)) for seed in range(3))
            )
            assert list(counts) == [8, 8, 8]
            for seed, content in contents.items():
                np.testing.assert_array_equal(stage.memory[30 + 8 * seed : 38 + 8 * seed], content)

        self.run(scenario)

    def test_the_oldest_blocks_make_room_and_events_tell_what_is_kept(self) -> None:
        async def scenario(stage: Stage) -> None:
            kept: set[int] = set()
            for seed in range(40):
                content = stage.write(range(8), seed)
                await stage.offload(chain(seed + 1, 8), range(8))
                assert await stage.load(chain(seed + 1, 8), range(20, 28)) == 8
                np.testing.assert_array_equal(stage.memory[20:28], content)
                for event in stage.tier.take_events():
                    hashes = unpack_hashes(getattr(event, "block_hashes", b"")).tolist()
                    if isinstance(event, BlockStored):
                        assert event.tier == stage.tier.tier
                        kept.update(hashes)
                    elif isinstance(event, BlockRemoved):
                        kept.difference_update(hashes)
            assert len(kept) <= stage.tier.num_blocks
            for seed in range(40):
                hashes = chain(seed + 1, 8)
                assert stage.tier.locate(hashes) == 0 or hashes[0, 0] in kept
            assert stage.tier.locate(chain(40, 8)) == 8

        self.run(scenario)

    def test_a_cleared_tier_has_nothing(self) -> None:
        async def scenario(stage: Stage) -> None:
            stage.write(range(4), 1)
            await stage.offload(chain(1, 4), range(4))
            stage.tier.clear()
            assert stage.tier.locate(chain(1, 4)) == 0
            assert await stage.offload(chain(1, 4), range(4)) == [0, 1, 2, 3]

        self.run(scenario)

    def test_closing_ends_copies_under_way(self) -> None:
        async def scenario(stage: Stage) -> None:
            stage.write(range(8), 1)
            await stage.offload(chain(1, 8), range(8))
            ended: list[int] = []
            begin(stage.tier, chain(1, 8), range(20, 28), ended.append)
            stage.tier.offload(
                chain(2, 8), [BlockId(number) for number in range(8)], lambda _: ended.append(-1)
            )
            await stage.tier.close()
            assert len(ended) == 2, "both have called done"

        self.run(scenario)

    def test_the_time_of_a_load_is_predicted_once_one_was_measured(self) -> None:
        async def scenario(stage: Stage) -> None:
            assert stage.tier.load_s(8) == 0
            stage.write(range(8), 1)
            await stage.offload(chain(1, 8), range(8))
            await stage.load(chain(1, 8), range(20, 28))
            assert 0 < stage.tier.load_s(8) < stage.tier.load_s(16)

        self.run(scenario)
