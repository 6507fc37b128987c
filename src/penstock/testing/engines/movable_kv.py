"""Engine suite of movable KV: an engine whose KV Penstock transfers, and whose role it changes."""

import asyncio
import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol, cast

import msgspec
import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from penstock.core.hashing import block_hashes
from penstock.core.ids import BlockId, RequestId
from penstock.core.types.events import BlockStored
from penstock.core.types.instances import EngineInfo, Role
from penstock.core.types.requests import Request
from penstock.core.wire import HashArray
from penstock.seams import Engine, KvBlocks, KvPartialBlocks, RoleAware
from penstock.testing.engines.case import EngineCase
from penstock.testing.engines.probe import EngineProbe, EngineSetup, make_request
from penstock.transfer.regions.arena import region_of


class MovingEngine(Engine, KvPartialBlocks, Protocol):
    """An engine whose blocks can be pinned, read and written."""


class MovingCase(EngineCase):
    """Makes engines whose blocks can be moved."""

    @asynccontextmanager
    async def moving(self, setup: EngineSetup | None = None) -> AsyncIterator[EngineProbe[MovingEngine]]:
        """Start an engine, as `probe` does."""
        async with self.probe(setup) as probe:
            assert isinstance(probe.engine, KvPartialBlocks), "claims to move KV without KvPartialBlocks"
            yield cast("EngineProbe[MovingEngine]", probe)


def block_bytes(engine: KvBlocks, info: EngineInfo) -> NDArray[np.uint8]:
    """View an engine's KV memory as (blocks, kv_bytes_per_block); no columns for an engine without KV memory."""
    memory = engine.kv_memory()
    if not memory:
        return np.zeros((info.total_blocks, 0), np.uint8)
    ((all_blocks,),) = memory
    region = region_of(all_blocks)
    view = (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
    return np.ctypeslib.as_array(view).reshape(-1, info.kv_bytes_per_block)


def move_blocks(
    source: EngineProbe[MovingEngine], target: EngineProbe[MovingEngine], hashes: HashArray
) -> int:
    """Copy leading blocks that the source has and the target lacks; return how many the target has now."""
    held = target.engine.pin(hashes)
    pinned = source.engine.pin(hashes)
    missing = pinned[len(held) :]
    reserved = target.engine.reserve(len(missing)) or []
    copied = missing[: len(reserved)]
    block_bytes(target.engine, target.info)[reserved] = block_bytes(source.engine, source.info)[copied]
    parent = int(hashes[len(held) - 1, 0]) if held else None
    target.engine.publish(reserved, hashes[len(held) : len(held) + len(reserved)], parent)
    target.engine.unpin([*held, *reserved])
    source.engine.unpin(pinned)
    return len(held) + len(reserved)


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


class EnginePartialBlocks(MovingCase):
    """Tests of `KvPartialBlocks`."""

    def test_partial_blocks_are_transferred(self) -> None:
        size = self.setup.block_size
        for tail in (1, size - 1):
            prompt = self.prompt(3 * size + tail)
            hashes = block_hashes(np.array(prompt, dtype=np.int32), size)

            async def main(prompt: list[int] = prompt, hashes: HashArray = hashes, tail: int = tail) -> None:
                async with self.moving() as source, self.moving() as target, self.moving() as alone:
                    (expected,) = await alone.run(make_request("a", prompt, max_tokens=9))
                    first, kept = await self._first_token(source, prompt)
                    assert kept is not None
                    assert first == expected.token_ids[:1]
                    move_blocks(source, target, hashes)
                    (given,) = target.engine.reserve(1) or ()
                    block_bytes(target.engine, target.info)[given] = block_bytes(source.engine, source.info)[
                        kept
                    ]
                    source.engine.unpin([kept])
                    going_on = make_request("b", prompt + first, max_tokens=9, num_emitted=1)
                    target.submit(going_on)
                    target.engine.give_partial_block(going_on.request_id, given, tail)
                    await target.finish()
                    assert target.answers["b"].token_ids == expected.token_ids[1:]
                    load = target.engine.load()
                    assert load.prefilled_tokens == 1, "but for the first token all was there"
                    for probe in (source, target):
                        assert probe.engine.load().active_blocks == 0

            self.run(main())

    def test_a_partial_block_without_its_full_blocks_is_computed_again(self) -> None:
        size = self.setup.block_size
        prompt = self.prompt(2 * size + 3)

        async def main() -> None:
            async with self.moving() as source, self.moving() as target:
                (expected,) = await source.run(make_request("a", prompt))
                given = target.engine.reserve(3) or ()
                for number, block_id in enumerate(given):
                    request = make_request(f"b{number}", prompt)
                    if number:
                        target.submit(request)
                    target.engine.give_partial_block(
                        request.request_id, block_id, 3
                    )  # the first engine knows no such request
                target.abort("b1")
                assert target.engine.load().active_blocks == 1
                await target.finish()
                assert target.answers["b2"].token_ids == expected.token_ids
                assert target.engine.load().prefilled_tokens == len(prompt)
                assert target.engine.load().active_blocks == 0

        self.run(main())

    def test_unclaimed_partial_blocks_are_freed(self) -> None:
        size = self.setup.block_size

        async def main() -> None:
            async with self.moving(replace(self.setup, kv_blocks=12)) as probe:
                _, full = await self._first_token(probe, self.prompt(2 * size))
                assert full is None
                _, kept = await self._first_token(probe, self.prompt(2 * size + 1, 3))
                assert kept is not None
                before = block_bytes(probe.engine, probe.info)[kept].copy()
                await probe.run(make_request("other", self.prompt(8 * size, 5), max_tokens=size))
                np.testing.assert_array_equal(block_bytes(probe.engine, probe.info)[kept], before)
                probe.engine.unpin([kept])
                probe.submit(_transferred("late", self.prompt(2 * size + 1, 7)))
                await probe.finish()
                assert probe.engine.load().active_blocks <= 1
                await probe.run(make_request("next", self.prompt(3, 8), max_tokens=1))
                assert probe.engine.claim_partial_block(RequestId("late")) is None
                assert probe.engine.load().active_blocks == 0

        self.run(main())

    async def _first_token(
        self, probe: EngineProbe[MovingEngine], prompt: list[int]
    ) -> tuple[list[int], BlockId | None]:
        """Compute a prompt like a prefill worker; return its first token and its pinned partial block."""
        request = _transferred(f"prompt{len(probe.answers)}", prompt)
        probe.submit(request)
        while (
            request.request_id not in probe.answers or probe.answers[request.request_id].finish_reason is None
        ):
            await probe.step()
        kept = probe.engine.claim_partial_block(request.request_id)
        return probe.answers[request.request_id].token_ids, kept


def _transferred(name: str, prompt: list[int]) -> Request:
    return structs.replace(make_request(name, prompt, max_tokens=1), prefill_only=True)


class MovableKvSuite(EngineBlocks, EnginePartialBlocks):
    """Tests of `KvBlocks`, `KvPartialBlocks` and `RoleAware`. They compare engines: `starts_slowly` must be False."""

    def test_answers_are_equal_in_every_role(self) -> None:
        request = make_request("a", self.prompt(40), max_tokens=6)

        async def main() -> None:
            async with self.moving() as probe:
                assert isinstance(probe.engine, RoleAware), "claims to change roles without RoleAware"
                answers = []
                for role in Role:
                    info = probe.engine.assume(role)
                    same = {
                        "max_batch_tokens": info.max_batch_tokens,
                        "prompts_at_once": info.prompts_at_once,
                    }
                    assert info == msgspec.structs.replace(probe.info, **same)
                    probe.submit(msgspec.structs.replace(request, request_id=RequestId(role)))
                    await probe.finish()
                    answers.append(probe.answers[role].token_ids)
                assert answers[0] == answers[1] == answers[2] != []

        self.run(main())
