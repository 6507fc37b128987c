"""Engine suite, KV blocks: prefix cache, KV events, memory pressure, transfers, load."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from penstock.core.errors import RequestError
from penstock.core.hashing import DEFAULT_KEY, block_hashes
from penstock.core.ids import BlockId
from penstock.core.types.events import BlockRemoved, BlockStored
from penstock.core.wire import PackedHashes, unpack_hashes
from penstock.seams import KvPartialBlocks
from penstock.testing.engines.case import SETUP, EngineCase, reference_engine
from penstock.testing.engines.probe import (
    Answer,
    block_bytes,
    kv_event_trace,
    make_request,
    make_workload,
    move_blocks,
)
from penstock.testing.loop import run_async


class EngineBlocks(EngineCase):
    """Tests of an engine's KV blocks."""

    def test_a_prefix_is_computed_once(self) -> None:
        size = SETUP.block_size
        prompt = self.prompt(4 * size)

        async def main() -> None:
            async with self.probe() as probe:
                (first,) = await probe.run(make_request("a", prompt))
                (same,) = await probe.run(make_request("b", prompt))
                (longer,) = await probe.run(make_request("c", prompt + self.prompt(5, 9)))
                (other_salt,) = await probe.run(make_request("d", prompt, salt=b"another tenant"))
                (follow_up,) = await probe.run(
                    make_request("e", prompt + first.token_ids + self.prompt(3, 8))
                )
                cached = [answer.cached_tokens for answer in (first, same, longer, other_salt, follow_up)]
                assert cached == [
                    0,
                    3 * size,
                    4 * size,
                    0,
                    4 * size + (len(first.token_ids) - 1) // size * size,
                ]
                assert same.token_ids == first.token_ids == other_salt.token_ids
                assert probe.engine.load().prefix_hit_tokens == sum(tokens or 0 for tokens in cached)

        run_async(main())

    def test_hashes_of_the_request_and_of_the_engine_are_equal(self) -> None:
        prompt = self.prompt(30)
        request = make_request("b", prompt, salt=b"s")
        hashes = block_hashes(request.token_ids, SETUP.block_size, b"s", key=DEFAULT_KEY)

        async def main() -> None:
            async with self.probe() as probe:
                await probe.run(make_request("a", prompt, salt=b"s"))
                (answer,) = await probe.run(
                    structs.replace(request, block_hashes=PackedHashes(hashes.tobytes()))
                )
                assert answer.cached_tokens == 24
                with pytest.raises(RequestError, match="block_hashes"):
                    probe.engine.submit(structs.replace(request, block_hashes=PackedHashes(b"too short")))

        run_async(main())

    def test_events_match_the_prefix_cache(self) -> None:
        size = SETUP.block_size
        setup = replace(SETUP, kv_blocks=24, context_length=160)

        async def main() -> None:
            async with self.probe(setup) as probe:
                for index in range(12):
                    prompt = self.prompt(3 * size + index, seed=index % 5)
                    (answer,) = await probe.run(make_request(f"r{index}", prompt, max_tokens=2 * size))
                    known = np.array(prompt + answer.token_ids, dtype=np.int32)
                    computed = block_hashes(known[:-1], size)[:, 0].tolist()
                    resident = probe.resident()
                    assert set(computed) <= set(resident)
                    assert resident.total() == probe.engine.load().cached_blocks <= 24
                assert any(isinstance(event, BlockRemoved) for event in probe.events)
                for event in probe.events:
                    assert not isinstance(event, BlockStored) or event.block_size == size

        run_async(main())

    def test_a_prompt_is_one_event(self) -> None:
        size = SETUP.block_size
        prompt = self.prompt(5 * size)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)[:, 0].tolist()

        async def main() -> None:
            async with self.probe() as probe:
                await probe.run(make_request("a", prompt[: 2 * size], max_tokens=1))
                await probe.run(make_request("b", prompt, max_tokens=1))
                first, second = probe.events
                assert isinstance(first, BlockStored)
                assert isinstance(second, BlockStored)
                assert (first.parent_block_hash, second.parent_block_hash) == (None, hashes[1])
                assert unpack_hashes(first.block_hashes).tolist() == hashes[:2]
                assert unpack_hashes(second.block_hashes).tolist() == hashes[2:]

        run_async(main())

    def test_requests_preempted_for_lack_of_blocks_finish(self) -> None:
        requests = [make_request(f"r{index}", self.prompt(12, index), max_tokens=60) for index in range(8)]
        tight = replace(SETUP, kv_blocks=20, context_length=160)

        async def main() -> list[Answer]:
            async with self.probe(tight) as probe:
                answers = await probe.run(*requests)
                load = probe.engine.load()
                assert load.preemptions > 0, "the test is to run out of blocks"
                assert load.active_blocks == 0
                assert load.generated_tokens == 8 * 60
                assert probe.resident().total() == load.cached_blocks
                return answers

        roomy = self.answer(*requests)
        assert [answer.token_ids for answer in run_async(main())] == [answer.token_ids for answer in roomy]

    def test_the_load_counts_completed_work(self) -> None:
        async def main() -> None:
            async with self.probe(replace(SETUP, max_batch_tokens=32, max_running_requests=2)) as probe:
                probe.submit(
                    *(make_request(f"r{index}", self.prompt(40, index), max_tokens=9) for index in range(3))
                )
                load = probe.engine.load()
                assert (load.running_requests, load.waiting_requests, load.queued_prefill_tokens) == (
                    0,
                    3,
                    120,
                )
                step = await probe.step()
                assert step.load == probe.engine.load()
                load = probe.engine.load()
                assert (load.running_requests, load.waiting_requests, load.queued_prefill_tokens) == (
                    1,
                    2,
                    88,
                )
                assert (load.context_tokens, load.active_blocks) == (32, 4)
                await probe.finish()
                load = probe.engine.load()
                assert (load.prefilled_tokens, load.generated_tokens) == (120, 27)
                assert load.steps >= 3 + 9
                assert load.cached_blocks == 3 * (48 // SETUP.block_size)

        run_async(main())

    def test_the_same_workload_gives_the_same_events(self) -> None:
        """Compared with the mock engine, the reference for scheduling and caching."""
        setup = replace(SETUP, kv_blocks=24, context_length=96)
        workload = make_workload(random.Random(5), requests=40, vocab_size=self.vocab_size, tokens_max=96)

        async def main() -> None:
            reference = await kv_event_trace(reference_engine(setup, self.vocab_size), workload)
            assert {kind for kind, *_ in reference} == {"stored", "removed"}
            assert await kv_event_trace(self.make_engine(setup), workload) == reference
            assert await kv_event_trace(self.make_engine(setup), workload) == reference

        run_async(main())

    def test_blocks_move_to_another_engine(self) -> None:
        size = SETUP.block_size
        prompt = self.prompt(6 * size + 3)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)
        request = make_request("a", prompt, max_tokens=12)

        async def main() -> None:
            async with self.probe() as source, self.probe() as target:
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

        run_async(main())

    def test_blocks_of_an_unfinished_prompt_can_be_pinned_with_kv_by_chunk(self) -> None:
        size = SETUP.block_size
        prompt = self.prompt(5 * size + 1)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)
        request = structs.replace(make_request("a", prompt, max_tokens=1), prefill_only=True)

        async def main() -> None:
            async with self.probe(replace(SETUP, max_batch_tokens=2 * size)) as probe:
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
                tail = (
                    probe.engine.claim_partial_block(request.request_id)
                    if isinstance(probe.engine, KvPartialBlocks)
                    else None
                )
                probe.engine.unpin([] if tail is None else [tail])
                assert probe.engine.load().active_blocks == 0

        run_async(main())

    def test_blocks_are_complete_when_they_can_be_pinned(self) -> None:
        """After each chunk of a prompt, after its end, and at each event; also on a device that only queues its writes."""
        size = SETUP.block_size
        prompt = self.prompt(6 * size + 1)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)

        async def main() -> None:
            async with self.probe(replace(SETUP, max_batch_tokens=2 * size)) as probe:
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

        run_async(main())

    def test_pinned_blocks_are_not_evicted(self) -> None:
        size = SETUP.block_size
        prompt = self.prompt(4 * size)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)

        async def main() -> None:
            async with self.probe(replace(SETUP, kv_blocks=12)) as probe:
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

        run_async(main())

    def test_a_request_that_waits_for_pinned_blocks_runs_when_they_are_unpinned(self) -> None:
        size = SETUP.block_size

        async def main() -> None:
            async with self.probe(replace(SETUP, kv_blocks=12)) as probe:
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

        run_async(main())

    def test_no_block_is_reserved_that_a_running_request_will_need(self) -> None:
        size = SETUP.block_size
        prompt = self.prompt(12 * size)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)

        async def main() -> None:
            async with self.probe() as source, self.probe(replace(SETUP, kv_blocks=10)) as target:
                await source.run(make_request("a", prompt, max_tokens=1))
                target.submit(make_request("live", self.prompt(3 * size, 1), max_tokens=4 * size))
                await target.step()
                held = target.engine.load().active_blocks
                assert target.engine.reserve(10 - held) is None
                assert move_blocks(source, target, hashes[:3]) == 3
                await target.finish()
                assert target.engine.load().preemptions == 0
                assert target.resident().total() == target.engine.load().cached_blocks

        run_async(main())
