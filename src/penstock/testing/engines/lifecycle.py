"""Core engine suite, life: start, close, abort, the queue, load."""

import asyncio

import pytest

from penstock.core.errors import Overloaded, RequestError, Unavailable
from penstock.core.types.load import Step
from penstock.testing.engines.case import FOREVER, EngineCase
from penstock.testing.engines.probe import make_request


class EngineLifecycle(EngineCase):
    """Tests of an engine's start and end, of its queue, and of what it says of itself."""

    def test_engine_info_is_complete(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                info = probe.info
                assert info.block_size > 0
                assert info.data_parallel * info.total_blocks == probe.engine.load().total_blocks > 0
                assert 0 < info.context_length <= info.total_blocks * info.block_size
                assert info.max_batch_tokens > 0
                assert info.max_running_requests > 0
                assert await probe.engine.start() == info

        self.run(main())

    def test_close_is_safe_twice_and_before_start(self) -> None:
        async def main() -> None:
            await (await self.lone_engine()).close()
            engine = await self.lone_engine()
            try:
                await engine.start()
            finally:
                await engine.close()
            await engine.close()
            with pytest.raises(Unavailable):
                engine.submit(make_request("late", self.prompt(5)))

        self.run(main())

    def test_close_ends_a_pending_wait_for_steps(self) -> None:
        async def main() -> None:
            engine = await self.lone_engine()
            await engine.start()

            async def consume() -> list[Step]:
                return [step async for step in engine.steps()]

            async with asyncio.TaskGroup() as group:
                consumer = group.create_task(consume())
                await asyncio.sleep(0.01)
                await engine.close()
            assert not any(step.deltas for step in consumer.result())

        self.run(main())

    def test_aborted_requests_are_silent_and_leave_nothing(self) -> None:
        """Of a request in the queue, in prefill and in decode; the probe checks that no delta follows."""
        decoding = make_request("decode", self.prompt(20, 2), max_tokens=FOREVER)
        others = (
            make_request("prefill", self.prompt(200, 1), max_tokens=20),
            make_request("waiting", self.prompt(10)),
            make_request("kept", self.prompt(9)),
        )

        async def main() -> None:
            async with self.probe() as probe:
                probe.submit(decoding)
                while not probe.answers[decoding.request_id].token_ids:
                    await probe.step()
                probe.submit(*others)
                load = probe.engine.load()
                assert load.running_requests + load.waiting_requests == 4
                assert load.queued_prefill_tokens == 219
                for request_id in ("waiting", "prefill", "decode", "unknown"):
                    probe.abort(request_id)
                await probe.finish()
                await self.check_idle(probe)
                assert len(probe.answers["kept"].token_ids) == 8
                probe.abort("kept")

        self.run(main())

    def test_the_id_of_an_aborted_request_can_be_used_again(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                probe.submit(make_request("gone", self.prompt(50, 1), max_tokens=FOREVER))
                probe.submit(make_request("kept", self.prompt(50, 2), max_tokens=5))
                async with asyncio.TaskGroup() as group:
                    group.create_task(probe.step())
                    await asyncio.sleep(0)
                    probe.abort("gone")
                probe.submit(make_request("gone", self.prompt(20, 3), max_tokens=4))
                await probe.finish()
                assert len(probe.answers["gone"].token_ids) == 4
                assert len(probe.answers["kept"].token_ids) == 5
                await self.check_idle(probe)

        self.run(main())

    def test_aborted_requests_leave_room_for_others(self) -> None:
        """Twice the KV blocks' worth of aborted requests, then one with the longest context."""

        async def main() -> None:
            async with self.probe() as probe:
                room = min(probe.info.total_blocks * probe.info.block_size, 8192)
                for number in range(2 * room // 200):
                    request = make_request(f"r{number}", self.prompt(200, number), max_tokens=FOREVER)
                    probe.submit(request)
                    while not probe.answers[request.request_id].token_ids:
                        await probe.step()
                    probe.abort(request.request_id)
                longest = self.prompt(probe.info.context_length - 20)
                (answer,) = await probe.run(make_request("longest", longest, max_tokens=20))
                assert len(answer.token_ids) == 20
                await self.check_idle(probe)

        self.run(main())

    def test_more_requests_than_kv_blocks_hold_all_finish(self) -> None:
        requests = [make_request(f"r{index}", self.prompt(60, index), max_tokens=150) for index in range(12)]

        async def main() -> list[int]:
            async with self.probe() as probe:
                answers = await probe.run(*requests)
                await self.check_idle(probe)
                self.check_equal(answers[:1], alone)
                return [len(answer.token_ids) for answer in answers]

        alone = [self.answer(requests[0])[0].token_ids]
        assert self.run(main()) == [150] * 12

    def test_a_full_queue_refuses(self) -> None:
        """At the latest with `max_waiting_requests` beside `max_running_requests`, with a time after which to retry."""

        async def main() -> None:
            async with self.probe() as probe:
                least = self.setup.max_waiting_requests
                most = (least + probe.info.max_running_requests) * probe.info.data_parallel
                requests = (make_request(f"r{index}", self.prompt(5, index)) for index in range(most + 1))
                with pytest.raises(Overloaded) as refused:
                    probe.submit(*requests)
                assert least <= len(probe.answers) <= most
                assert refused.value.retry_after_s
                await probe.finish()
                assert all(len(answer.token_ids) == 8 for answer in probe.answers.values())
                await probe.run(make_request("later", self.prompt(5)))

        self.run(main())

    def test_the_id_of_an_unfinished_request_is_refused(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                probe.submit(make_request("a", self.prompt(5), max_tokens=20))
                with pytest.raises(RequestError, match="under way"):
                    probe.engine.submit(make_request("a", self.prompt(6)))
                await probe.finish()
                assert len(probe.answers["a"].token_ids) == 20
                await probe.run(make_request("a", self.prompt(6)))

        self.run(main())

    def test_the_load_counts_all_requests_and_their_work(self) -> None:
        requests = [make_request(f"r{index}", self.prompt(40, index), max_tokens=9) for index in range(3)]

        async def main() -> None:
            async with self.probe() as probe:
                before = probe.engine.load()
                probe.submit(*requests)
                load = probe.engine.load()
                assert load.running_requests + load.waiting_requests == 3
                assert load.queued_prefill_tokens == 120
                await probe.finish()
                await self.check_idle(probe)
                load = probe.engine.load()
                assert load.generated_tokens - before.generated_tokens == 27
                prompts = load.prefilled_tokens - before.prefilled_tokens
                prompts += load.prefix_hit_tokens - before.prefix_hit_tokens
                assert prompts == 120
                assert load.steps > before.steps

        self.run(main())
