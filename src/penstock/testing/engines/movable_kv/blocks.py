"""Engine suite of movable KV: blocks that are pinned, read, written and published."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from penstock.core.hashing import block_hashes
from penstock.core.ids import BlockId
from penstock.core.types.events import BlockStored
from penstock.testing.engines.movable_kv.moving import MovingCase, block_bytes, move_blocks
from penstock.testing.engines.probe import make_request


class EngineBlocks(MovingCase):
    """Tests of `KvBlocks`."""

    def test_blocks_move_to_another_engine(self) -> None:
        size = self.setup.block_size
        prompt = self.prompt(6 * size + 3)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)
        request = make_request("a", prompt, max_tokens=12)

        async def main() -> None:
            async with self.moving() as source, self.moving() as target:
                (expected,) = await source.run(request)
                assert target.engine.pin(hashes) == []
                assert move_blocks(source, target, hashes[:2]) == 2
                assert move_blocks(source, target, hashes) == 6
                assert move_blocks(source, target, hashes) == 6
                assert target.engine.load().active_blocks == source.engine.load().active_blocks == 0
                found, copied = (
                    block_bytes(probe.engine, probe.info)[list(probe.engine.pin(hashes))]
                    for probe in (source, target)
                )
                np.testing.assert_array_equal(found, copied)
                assert target.engine.load().active_blocks == 6
                (answer,) = await target.run(request)
                assert answer.cached_tokens == 6 * size
                assert answer.token_ids == expected.token_ids
                moved = [event for event in target.events if isinstance(event, BlockStored)]
                assert [event.parent_block_hash for event in moved[:2]] == [None, int(hashes[1, 0])]
                assert target.resident() == source.resident()

        self.run(main())

    def test_blocks_of_an_unfinished_prompt_can_be_pinned_with_kv_by_chunk(self) -> None:
        size = self.setup.block_size
        prompt = self.prompt(5 * size + 1)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)
        request = structs.replace(make_request("a", prompt, max_tokens=1), prefill_only=True)

        async def main() -> None:
            async with self.moving(replace(self.setup, max_batch_tokens=2 * size)) as probe:
                if not probe.info.kv_by_chunk:
                    pytest.skip("its blocks can be held once a whole prompt is computed")
                probe.submit(request)
                held: list[BlockId] = []
                for blocks in (2, 4):
                    step = await probe.step()
                    assert step.prefilling == ("a",)
                    assert not step.deltas
                    held += probe.engine.pin(hashes[len(held) :])
                    assert len(held) == blocks
                before = block_bytes(probe.engine, probe.info)[held].copy()
                last = await probe.step()
                assert last.prefilling == ()
                held += probe.engine.pin(hashes[4:])
                assert len(held) == len(set(held)) == 5
                np.testing.assert_array_equal(block_bytes(probe.engine, probe.info)[held[:4]], before)
                probe.engine.unpin(held)
                tail = probe.engine.claim_partial_block(request.request_id)
                probe.engine.unpin([] if tail is None else [tail])
                assert probe.engine.load().active_blocks == 0

        self.run(main())

    def test_blocks_are_complete_when_they_can_be_pinned(self) -> None:
        """After each chunk of a prompt, after its end, and at each event; also on a device that only queues its writes."""
        size = self.setup.block_size
        prompt = self.prompt(6 * size + 1)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)

        async def main() -> None:
            async with self.moving(replace(self.setup, max_batch_tokens=2 * size)) as probe:
                probe.submit(make_request("a", prompt, max_tokens=2))
                held: list[BlockId] = []
                seen: list[NDArray[np.uint8]] = []
                while probe.is_busy:
                    await probe.step()
                    new = probe.engine.pin(hashes[len(held) :])
                    seen += [row.copy() for row in block_bytes(probe.engine, probe.info)[list(new)]]
                    held += new
                    assert {int(low) for low in hashes[: len(held), 0]} <= set(probe.resident())
                assert len(held) == 6
                await probe.run(
                    make_request("b", self.prompt(3, 1), max_tokens=1)
                )  # whatever was queued is done
                after = block_bytes(probe.engine, probe.info)
                for number, (block_id, content) in enumerate(zip(held, seen, strict=True)):
                    assert np.array_equal(after[block_id], content), (
                        f"block {number} changed after it could be held"
                    )
                probe.engine.unpin(held)

        self.run(main())

    def test_pinned_blocks_are_not_evicted(self) -> None:
        size = self.setup.block_size
        prompt = self.prompt(4 * size)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)

        async def main() -> None:
            async with self.moving(replace(self.setup, kv_blocks=12)) as probe:
                await probe.run(make_request("a", prompt, max_tokens=1))
                pinned = probe.engine.pin(hashes)
                before = block_bytes(probe.engine, probe.info)[list(pinned)].copy()
                for index in range(6):
                    await probe.run(
                        make_request(f"other{index}", self.prompt(5 * size, index + 1), max_tokens=size)
                    )
                np.testing.assert_array_equal(block_bytes(probe.engine, probe.info)[list(pinned)], before)
                (again,) = await probe.run(make_request("b", prompt, max_tokens=1))
                assert again.cached_tokens == 3 * size
                assert probe.engine.load().active_blocks == 4
                probe.engine.unpin(pinned)
                assert probe.engine.load().active_blocks == 0
                (large,) = await probe.run(make_request("c", self.prompt(10 * size, 99), max_tokens=size))
                assert large.error is None

        self.run(main())

    def test_a_request_that_waits_for_pinned_blocks_runs_when_they_are_unpinned(self) -> None:
        size = self.setup.block_size

        async def main() -> None:
            async with self.moving(replace(self.setup, kv_blocks=12)) as probe:
                reserved = probe.engine.reserve(8)
                assert reserved is not None
                assert len(set(reserved)) == 8
                assert probe.engine.reserve(5) is None
                probe.submit(make_request("a", self.prompt(6 * size), max_tokens=2))
                async with asyncio.TaskGroup() as group:
                    ending = group.create_task(probe.finish())
                    await asyncio.sleep(0.01)
                    assert not ending.done()
                    probe.engine.unpin(reserved)
                assert probe.answers["a"].error is None

        self.run(main())

    def test_no_block_is_reserved_that_a_running_request_will_need(self) -> None:
        size = self.setup.block_size
        prompt = self.prompt(12 * size)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)

        async def main() -> None:
            async with self.moving() as source, self.moving(replace(self.setup, kv_blocks=10)) as target:
                await source.run(make_request("a", prompt, max_tokens=1))
                target.submit(make_request("live", self.prompt(3 * size, 1), max_tokens=4 * size))
                await target.step()
                held = target.engine.load().active_blocks
                assert target.engine.reserve(10 - held) is None
                assert move_blocks(source, target, hashes[:3]) == 3
                await target.finish()
                assert target.engine.load().preemptions == 0
                assert target.resident().total() == target.engine.load().cached_blocks

        self.run(main())
