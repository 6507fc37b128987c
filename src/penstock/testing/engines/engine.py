"""The conformance suite of engines. Subclass it and make an engine.

    class TestMyEngine(EngineSuite):
        def make_engine(self, setup):
            return MyEngine(blocks=setup.kv_blocks, ...)

A test makes several engines where it compares them: `make_engine` gives a new one at every call, of the same model.
"""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from penstock.core.ids import RequestId
from penstock.core.types.instances import Role
from penstock.seams import RoleAware
from penstock.testing.engines.answers import EngineAnswers
from penstock.testing.engines.blocks import EngineBlocks
from penstock.testing.engines.case import FOREVER, SETUP
from penstock.testing.engines.partial_blocks import EnginePartialBlocks
from penstock.testing.engines.probe import make_request
from penstock.testing.loop import run_async


class EngineSuite(EngineAnswers, EngineBlocks, EnginePartialBlocks):
    """Tests of `Engine`, `KvBlocks`, `KvPartialBlocks` and `RoleAware`; those in this class are about start, close and abort."""

    def test_engine_info_is_complete(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                info = probe.info
                assert info.block_size == SETUP.block_size
                assert info.total_blocks == probe.engine.load().total_blocks > 0
                assert 0 < info.context_length <= info.total_blocks * info.block_size
                assert info.max_batch_tokens == SETUP.max_batch_tokens
                assert info.max_running_requests == SETUP.max_running_requests
                assert await probe.engine.start() == info

        run_async(main())

    def test_answers_are_equal_in_every_role(self) -> None:
        request = make_request("a", self.prompt(40), max_tokens=6)

        async def main() -> None:
            async with self.probe() as probe:
                if not isinstance(probe.engine, RoleAware):
                    pytest.skip("works alike in every role")
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

        run_async(main())

    def test_close_is_safe_twice_and_before_start(self) -> None:
        async def main() -> None:
            await self.make_engine(SETUP).close()
            engine = self.make_engine(SETUP)
            await engine.start()
            await engine.close()
            await engine.close()

        run_async(main())

    def test_close_ends_a_pending_wait_for_steps(self) -> None:
        async def main() -> None:
            engine = self.make_engine(SETUP)
            await engine.start()

            async def consume() -> int:
                return len([step async for step in engine.steps()])

            async with asyncio.TaskGroup() as group:
                consumer = group.create_task(consume())
                await asyncio.sleep(0.01)
                await engine.close()
            assert consumer.result() == 0

        run_async(main())

    def test_abort_is_silent_and_frees_blocks(self) -> None:
        """Between steps, of a request in the queue, in prefill and in decode."""
        long_prompt = make_request("prefill", self.prompt(200, 1), max_tokens=20)
        decoding = make_request("decode", self.prompt(20, 2), max_tokens=FOREVER)

        async def main() -> None:
            setup = replace(SETUP, max_batch_tokens=32, max_running_requests=2)
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

        run_async(main())

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

        run_async(main())
