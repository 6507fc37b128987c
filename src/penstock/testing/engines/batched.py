"""Engine suite of `BatchedEngine` with any runner: what a step plans, how its blocks are counted, exact bounds."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from penstock.core.errors import Overloaded, RequestError
from penstock.core.hashing import block_hashes
from penstock.core.types.events import BlockStored
from penstock.core.wire import PackedHashes, unpack_hashes
from penstock.testing.engines.case import FOREVER, EngineCase
from penstock.testing.engines.probe import Answer, kv_event_trace, make_request, make_workload
from penstock.testing.engines.reference import reference_engine


class BatchedEngineSuite(EngineCase):
    """Tests of an engine that schedules as the mock engine does, step by step."""

    def test_engine_info_is_that_of_the_setup(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                info = probe.info
                assert info.block_size == self.setup.block_size
                assert info.total_blocks == self.setup.kv_blocks
                assert info.context_length == self.setup.context_length
                assert info.max_batch_tokens == self.setup.max_batch_tokens
                assert info.max_running_requests == self.setup.max_running_requests

        self.run(main())

    def test_block_hashes_of_another_length_are_refused(self) -> None:
        request = structs.replace(make_request("a", self.prompt(30)), block_hashes=PackedHashes(b"too short"))

        async def main() -> None:
            async with self.probe() as probe:
                with pytest.raises(RequestError, match="block_hashes"):
                    probe.engine.submit(request)

        self.run(main())

    def test_chunks_of_a_prompt_make_no_difference(self) -> None:
        request = make_request("a", self.prompt(100), max_tokens=10)
        setup = replace(self.setup, max_batch_tokens=16)

        async def main() -> Answer:
            async with self.probe(setup) as probe:
                probe.submit(request)
                steps = 0
                while not probe.answers[request.request_id].token_ids:
                    await probe.step()
                    steps += 1
                assert steps >= 100 // 16
                await probe.finish()
                return probe.answers[request.request_id]

        assert (
            self.run(main()).token_ids
            == self.answer(request, setup=replace(self.setup, max_batch_tokens=256))[0].token_ids
        )

    def test_a_request_larger_than_all_blocks_is_refused(self) -> None:
        async def main() -> None:
            async with self.probe(replace(self.setup, kv_blocks=8)) as probe:
                assert probe.info.context_length == 8 * self.setup.block_size
                with pytest.raises(RequestError, match="KV blocks"):
                    probe.engine.submit(make_request("a", self.prompt(8 * self.setup.block_size)))
                (answer,) = await probe.run(make_request("a", self.prompt(40), max_tokens=FOREVER))
                assert len(answer.token_ids) == 8 * self.setup.block_size - 40

        self.run(main())

    def test_a_full_queue_refuses_before_the_first_step(self) -> None:
        async def main() -> None:
            setup = replace(self.setup, max_running_requests=1, max_waiting_requests=3)
            async with self.probe(setup) as probe:
                probe.submit(*(make_request(f"r{index}", self.prompt(5, index)) for index in range(3)))
                with pytest.raises(Overloaded, match="3") as refused:
                    probe.engine.submit(make_request("late", self.prompt(5)))
                assert refused.value.retry_after_s
                await probe.step()
                probe.submit(make_request("r3", self.prompt(5)))
                await probe.finish()

        self.run(main())

    def test_abort_is_silent_and_frees_blocks(self) -> None:
        """Between steps, of a request in the queue, in prefill and in decode."""
        long_prompt = make_request("prefill", self.prompt(200, 1), max_tokens=20)
        decoding = make_request("decode", self.prompt(20, 2), max_tokens=FOREVER)

        async def main() -> None:
            setup = replace(self.setup, max_batch_tokens=32, max_running_requests=2)
            async with self.probe(setup) as probe:
                probe.submit(decoding)
                while not probe.answers[decoding.request_id].token_ids:
                    await probe.step()
                probe.submit(
                    long_prompt,
                    make_request("waiting", self.prompt(10)),
                    make_request("kept", self.prompt(9)),
                )
                await probe.step()
                load = probe.engine.load()
                assert (load.running_requests, load.waiting_requests) == (2, 2)
                assert load.queued_prefill_tokens >= 100
                for request_id in ("waiting", "prefill", "decode", "unknown"):
                    probe.abort(request_id)
                await probe.finish()
                load = probe.engine.load()
                assert (load.running_requests, load.waiting_requests, load.active_blocks) == (0, 0, 0)
                assert load.queued_prefill_tokens == load.context_tokens == 0
                probe.abort("kept")

        self.run(main())

    def test_abort_during_a_step(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                probe.submit(make_request("gone", self.prompt(50, 1), max_tokens=FOREVER))
                probe.submit(make_request("kept", self.prompt(50, 2), max_tokens=5))
                async with asyncio.TaskGroup() as group:
                    group.create_task(probe.step())
                    await asyncio.sleep(0)
                    probe.abort("gone")
                load = probe.engine.load()
                assert load.running_requests == 1
                assert load.active_blocks <= 8
                probe.submit(make_request("gone", self.prompt(20, 3), max_tokens=4))
                await probe.finish()
                assert len(probe.answers["gone"].token_ids) == 4
                assert probe.engine.load().active_blocks == 0

        self.run(main())

    def test_a_prompt_is_one_event(self) -> None:
        size = self.setup.block_size
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

        self.run(main())

    def test_requests_preempted_for_lack_of_blocks_finish(self) -> None:
        requests = [make_request(f"r{index}", self.prompt(12, index), max_tokens=60) for index in range(8)]
        tight = replace(self.setup, kv_blocks=20, context_length=160)

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
        assert [answer.token_ids for answer in self.run(main())] == [answer.token_ids for answer in roomy]

    def test_the_load_counts_completed_work(self) -> None:
        async def main() -> None:
            async with self.probe(replace(self.setup, max_batch_tokens=32, max_running_requests=2)) as probe:
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
                assert load.cached_blocks == 3 * (48 // self.setup.block_size)

        self.run(main())

    def test_the_same_workload_gives_the_same_events(self) -> None:
        """Compared with the mock engine, the reference for scheduling and caching."""
        setup = replace(self.setup, kv_blocks=24, context_length=96)
        workload = make_workload(random.Random(5), requests=40, vocab_size=self.vocab_size, tokens_max=96)

        async def main() -> None:
            reference = await kv_event_trace(reference_engine(setup, self.vocab_size), workload)
            assert {kind for kind, *_ in reference} == {"stored", "removed"}
            assert await kv_event_trace(self.make_engine(setup), workload) == reference
            assert await kv_event_trace(self.make_engine(setup), workload) == reference

        self.run(main())
