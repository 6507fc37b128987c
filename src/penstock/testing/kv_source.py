"""The conformance suite of `KvSource`: subclass it, put blocks into your source, and run it with pytest."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.hashing import block_hashes
from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.seams.kv import KvLoad, KvSource
from penstock.testing.loop import run_async

BLOCK_BYTES = 4096
BLOCK_SIZE = 4
DEVICE_BLOCKS = 64
TIMEOUT_S = 30.0

Memory = NDArray[np.uint8]
Scenario = Callable[["SourceStage"], Coroutine[Any, Any, None]]


def chain(seed: int, length: int) -> HashArray:
    """Return the (length, 2) hashes of a prefix; different seeds share nothing."""
    return block_hashes(np.full(length * BLOCK_SIZE, seed, np.int32), BLOCK_SIZE)


def random_blocks(count: int, seed: int) -> Memory:
    """Return (count, BLOCK_BYTES) random bytes."""
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), np.uint8)


class SourceStage(Protocol):
    """A source, and the device memory that it loads into."""

    @property
    def source(self) -> KvSource: ...

    @property
    def memory(self) -> Memory:
        """(DEVICE_BLOCKS, BLOCK_BYTES)."""
        ...

    async def put(self, hashes: HashArray, content: Memory) -> None:
        """Have the source hold the blocks of one prefix; called once."""
        ...


async def load_into(
    source: KvSource, hashes: HashArray, targets: Sequence[int], *, cancels: bool = False
) -> int:
    """Load and wait; returns the blocks that arrived."""
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    load = begin(source, hashes, targets, done.set_result)
    assert not done.done(), "done is called later, not by load itself"
    if cancels:
        load.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        count = await done
    load.cancel()
    return count


def begin(source: KvSource, hashes: HashArray, targets: Sequence[int], done: Callable[[int], None]) -> KvLoad:
    """Begin to load."""
    return source.load(hashes, [BlockId(number) for number in targets], done)


class KvSourceSuite:
    """What every `KvSource` must do."""

    def source_stage(self) -> AbstractAsyncContextManager[SourceStage]:
        """Make a source without blocks; leaving the context closes it."""
        raise NotImplementedError

    def on_source(self, scenario: Scenario) -> None:
        async def main() -> None:
            async with self.source_stage() as stage:
                await scenario(stage)

        run_async(main(), timeout_s=TIMEOUT_S)

    def test_blocks_are_loaded_byte_by_byte_and_into_their_targets_alone(self) -> None:
        async def scenario(stage: SourceStage) -> None:
            hashes, content = chain(1, 8), random_blocks(8, 1)
            assert stage.source.locate(hashes) == 0
            await stage.put(hashes, content)
            stage.memory[:] = 0
            assert stage.source.locate(hashes) == 8
            assert not stage.source.is_off
            assert stage.source.chunk_blocks >= 1
            assert await load_into(stage.source, hashes, range(47, 39, -1)) == 8
            np.testing.assert_array_equal(stage.memory[40:48], content[::-1])
            assert not stage.memory[:40].any()
            assert not stage.memory[48:].any()

        self.on_source(scenario)

    def test_a_part_of_a_prefix_is_located_and_loaded(self) -> None:
        async def scenario(stage: SourceStage) -> None:
            hashes, content = chain(1, 10), random_blocks(6, 1)
            await stage.put(hashes[:6], content)
            assert stage.source.locate(hashes) == 6
            assert stage.source.locate(hashes[2:]) == 4
            assert stage.source.locate(hashes[2:5]) == 3
            assert stage.source.locate(hashes[6:]) == 0
            assert stage.source.locate(chain(2, 10)) == 0
            assert stage.source.locate(hashes[:0]) == 0
            assert await load_into(stage.source, hashes[2:5], [50, 52, 51]) == 3
            np.testing.assert_array_equal(stage.memory[[50, 52, 51]], content[2:5])

        self.on_source(scenario)

    def test_loads_run_side_by_side(self) -> None:
        async def scenario(stage: SourceStage) -> None:
            hashes, content = chain(1, 12), random_blocks(12, 1)
            await stage.put(hashes, content)
            loads = (
                load_into(stage.source, hashes[at : at + 4], range(40 + at, 44 + at)) for at in (0, 4, 8)
            )
            assert await asyncio.gather(*loads) == [4, 4, 4]
            np.testing.assert_array_equal(stage.memory[40:52], content)

        self.on_source(scenario)

    def test_a_cancelled_load_writes_nothing_after_it_is_done(self) -> None:
        async def scenario(stage: SourceStage) -> None:
            hashes, content = chain(1, 8), random_blocks(8, 1)
            await stage.put(hashes, content)
            for _ in range(10):
                count = await load_into(stage.source, hashes, range(40, 48), cancels=True)
                np.testing.assert_array_equal(stage.memory[40 : 40 + count], content[:count])
                stage.memory[40:48] = 7
                await asyncio.sleep(0.002)
                assert (stage.memory[40:48] == 7).all(), "its targets have a new owner"
            assert await load_into(stage.source, hashes, range(40, 48)) == 8, "it can be loaded afterwards"

        self.on_source(scenario)

    def test_the_time_of_a_load_is_predicted_from_those_before(self) -> None:
        async def scenario(stage: SourceStage) -> None:
            await stage.put(chain(1, 8), random_blocks(8, 1))
            await load_into(stage.source, chain(1, 8), range(40, 48))
            assert 0 < stage.source.load_s(8) < stage.source.load_s(16)

        self.on_source(scenario)


class FlippedBitSuite(KvSourceSuite):
    """What a `KvSource` must do when a bit is flipped between the source and the device."""

    def flipped(self) -> AbstractContextManager[object]:
        """While entered, have one bit of the first block of each load be wrong."""
        raise NotImplementedError

    def test_a_flipped_bit_is_noticed_and_not_served(self) -> None:
        async def scenario(stage: SourceStage) -> None:
            hashes, content = chain(1, 8), random_blocks(8, 1)
            await stage.put(hashes, content)
            with self.flipped():
                assert await load_into(stage.source, hashes, range(40, 48)) == 0
            assert stage.source.num_corrupt == 1
            assert stage.source.locate(hashes) == 0, "nobody is to load it again"

        self.on_source(scenario)
