"""What every engine must do, as tests. Subclass the suite and make an engine; see `tests/conformance`.

A test makes several engines where it compares them: `make_engine` gives a new one at every call, of the same model.
"""

import asyncio
import random
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from msgspec import structs

from penstock.core.errors import Overloaded, RequestError
from penstock.core.hashing import DEFAULT_KEY, block_hashes
from penstock.core.types import BlockRemoved, BlockStored, FinishReason, Request, SamplingParams
from penstock.core.wire import PackedHashes, unpack_hashes
from penstock.engine.mock import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduler import SchedulerConfig
from penstock.testing.engine_probe import (
    Answer,
    EngineProbe,
    EngineSetup,
    MovingEngine,
    kv_event_trace,
    make_request,
    make_workload,
)
from penstock.testing.loop import run_async

_SETUP = EngineSetup()
_FOREVER = 200  # tokens of an answer that a test does not wait for


class EngineSuite:
    """Tests of `Engine` and `BlockAccess`. `vocab_size` and `eos_token_ids` are those of the model that is made."""

    vocab_size: ClassVar[int] = 256
    eos_token_ids: ClassVar[tuple[int, ...]] = ()

    def make_engine(self, setup: EngineSetup) -> MovingEngine:
        """Make an engine that is not started, within the given limits, hashing with `DEFAULT_KEY`."""
        raise NotImplementedError

    def probe(self, setup: EngineSetup = _SETUP) -> EngineProbe:
        return EngineProbe(self.make_engine(setup))

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(self.vocab_size) for _ in range(length)]

    def answer(self, *requests: Request, setup: EngineSetup = _SETUP) -> list[Answer]:
        """Run requests together on a new engine."""

        async def main() -> list[Answer]:
            async with self.probe(setup) as probe:
                return await probe.run(*requests)

        return run_async(main())

    # ---- life -----------------------------------------------------------------------------------------

    def test_it_says_what_it_is(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                info = probe.info
                assert info.block_size == _SETUP.block_size
                assert info.total_blocks == probe.engine.load().total_blocks > 0
                assert 0 < info.context_length <= info.total_blocks * info.block_size
                assert info.max_batch_tokens == _SETUP.max_batch_tokens
                assert info.max_running_requests == _SETUP.max_running_requests
                assert await probe.engine.start() == info

        run_async(main())

    def test_close_is_safe_twice_and_before_start(self) -> None:
        async def main() -> None:
            await self.make_engine(_SETUP).close()
            engine = self.make_engine(_SETUP)
            await engine.start()
            await engine.close()
            await engine.close()

        run_async(main())

    def test_close_ends_the_steps_that_someone_waits_for(self) -> None:
        async def main() -> None:
            engine = self.make_engine(_SETUP)
            await engine.start()

            async def consume() -> int:
                return len([step async for step in engine.steps()])

            async with asyncio.TaskGroup() as group:
                consumer = group.create_task(consume())
                await asyncio.sleep(0.01)
                await engine.close()
            assert consumer.result() == 0

        run_async(main())

    # ---- tokens and ends ------------------------------------------------------------------------------

    def test_an_answer_has_as_many_tokens_as_asked_for(self) -> None:
        for max_tokens in (1, 2, 7):
            (answer,) = self.answer(make_request("a", self.prompt(10), max_tokens=max_tokens))
            assert len(answer.token_ids) == max_tokens
            assert answer.finish_reason is FinishReason.LENGTH
            assert all(0 <= token_id < self.vocab_size for token_id in answer.token_ids)

    def test_the_context_ends_an_answer(self) -> None:
        setup = replace(_SETUP, context_length=40)
        (answer,) = self.answer(make_request("a", self.prompt(30), max_tokens=_FOREVER), setup=setup)
        assert len(answer.token_ids) == 10
        assert answer.finish_reason is FinishReason.LENGTH

    def test_requests_do_not_disturb_each_other(self) -> None:
        requests = [
            make_request(f"r{index}", self.prompt(5 + 9 * index, seed=index), max_tokens=6 + index)
            for index in range(10)
        ]
        together = self.answer(*requests)
        assert [answer.token_ids for answer in together] == [self.answer(r)[0].token_ids for r in requests]

    def test_chunks_of_a_prompt_make_no_difference(self) -> None:
        request = make_request("a", self.prompt(100), max_tokens=10)
        setup = replace(_SETUP, max_batch_tokens=16)

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
            run_async(main()).token_ids
            == self.answer(request, setup=replace(_SETUP, max_batch_tokens=256))[0].token_ids
        )

    def test_a_stop_token_ends_an_answer(self) -> None:
        prompt = self.prompt(10)
        (whole,) = self.answer(make_request("a", prompt, max_tokens=20))
        stop = whole.token_ids[9]
        end = whole.token_ids.index(stop) + 1
        sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
        (answer,) = self.answer(make_request("a", prompt, sampling=sampling))
        assert answer.token_ids == whole.token_ids[:end]
        assert answer.finish_reason is FinishReason.STOP

    def test_no_stop_before_min_tokens(self) -> None:
        every_token = tuple(range(self.vocab_size // 2))
        sampling = SamplingParams(
            max_tokens=40, temperature=0.0, ignore_eos=True, stop_token_ids=every_token, min_tokens=5
        )
        for seed in range(4):
            (answer,) = self.answer(make_request("a", self.prompt(10, seed), sampling=sampling))
            assert len(answer.token_ids) > 5
            stops = [position for position, token in enumerate(answer.token_ids) if token in every_token]
            if answer.finish_reason is FinishReason.STOP:
                assert [position for position in stops if position >= 5] == [len(answer.token_ids) - 1]

    def test_an_end_of_sequence_token_ends_an_answer_that_heeds_it(self) -> None:
        if not self.eos_token_ids:
            pytest.skip("the model has no end-of-sequence token")

        def requests(*, ignore_eos: bool) -> list[Request]:
            sampling = SamplingParams(max_tokens=150, temperature=1.0, seed=1, ignore_eos=ignore_eos)
            return [make_request(f"r{i}", self.prompt(8, i), sampling=sampling) for i in range(24)]

        heeding = self.answer(*requests(ignore_eos=False))
        stopped = [answer for answer in heeding if answer.finish_reason is FinishReason.STOP]
        assert stopped, "no answer met an end-of-sequence token: choose a model where some do"
        for answer in heeding:
            ends = [token in self.eos_token_ids for token in answer.token_ids]
            assert not any(ends[:-1])
            assert ends[-1] == (answer.finish_reason is FinishReason.STOP)
        for answer in self.answer(*requests(ignore_eos=True)):
            assert answer.finish_reason is FinishReason.LENGTH
            assert len(answer.token_ids) == 150

    def test_a_request_that_moved_goes_on_exactly(self) -> None:
        prompt = self.prompt(20)
        for sampling in (
            SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
            SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True, frequency_penalty=0.5),
        ):
            (whole,) = self.answer(make_request("a", prompt, sampling=sampling, choice=1))
            for done in (1, 7, 23):
                request = make_request(
                    "a", prompt + whole.token_ids[:done], sampling=sampling, choice=1, num_emitted=done
                )
                (rest,) = self.answer(request)
                assert rest.token_ids == whole.token_ids[done:]
                assert rest.finish_reason is FinishReason.LENGTH

    def test_choices_differ_and_repeat(self) -> None:
        sampling = SamplingParams(max_tokens=16, temperature=1.0, seed=3, ignore_eos=True)
        prompt = self.prompt(12)

        def ask(choice: int) -> Request:
            return make_request(f"c{choice}", prompt, sampling=sampling, choice=choice)

        first = [answer.token_ids for answer in self.answer(ask(0), ask(1), ask(2))]
        again = [self.answer(ask(choice))[0].token_ids for choice in range(3)]
        assert first == again
        assert len({tuple(token_ids) for token_ids in first}) == 3

    def test_logprobs_come_with_every_token_of_those_who_ask(self) -> None:
        def ask(number: int | None) -> Request:
            sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=number)
            return make_request(f"l{number}", self.prompt(12), sampling=sampling)

        none, chosen, three = self.answer(ask(None), ask(0), ask(3))
        assert none.logprobs == []
        for answer, number in ((chosen, 0), (three, 3)):
            assert [logprob.token_id for logprob in answer.logprobs] == answer.token_ids
            for logprob in answer.logprobs:
                assert logprob.logprob <= 0
                assert len(logprob.top) == number
                assert list(logprob.top) == sorted(logprob.top, key=lambda pair: -pair[1])
                assert not number or logprob.top[0][1] == pytest.approx(logprob.logprob, abs=1e-4)

    # ---- what cannot be served ------------------------------------------------------------------------

    def test_what_can_never_run_is_refused(self) -> None:
        async def main() -> None:
            setup = replace(_SETUP, context_length=64)
            async with self.probe(setup) as probe:
                for request, what in (
                    (make_request("a", self.prompt(64)), "64"),
                    (make_request("a", []), "token_ids"),
                    (make_request("a", [0, self.vocab_size]), str(self.vocab_size)),
                    (make_request("a", [0, -1]), "-1"),
                    (make_request("a", self.prompt(5), max_tokens=0), "max_tokens"),
                    (make_request("a", self.prompt(5), max_tokens=2, num_emitted=2), "max_tokens"),
                    (make_request("a", self.prompt(5), num_emitted=5), "num_emitted"),
                ):
                    with pytest.raises(RequestError, match=what):
                        probe.engine.submit(request)
                (answer,) = await probe.run(make_request("a", self.prompt(63)))
                assert len(answer.token_ids) == 1

        run_async(main())

    def test_a_request_larger_than_all_blocks_is_refused(self) -> None:
        async def main() -> None:
            async with self.probe(replace(_SETUP, kv_blocks=8)) as probe:
                assert probe.info.context_length == 8 * _SETUP.block_size
                with pytest.raises(RequestError, match="KV blocks"):
                    probe.engine.submit(make_request("a", self.prompt(8 * _SETUP.block_size)))
                (answer,) = await probe.run(make_request("a", self.prompt(40), max_tokens=_FOREVER))
                assert len(answer.token_ids) == 8 * _SETUP.block_size - 40

        run_async(main())

    def test_a_full_queue_refuses(self) -> None:
        async def main() -> None:
            setup = replace(_SETUP, max_running_requests=1, max_waiting_requests=3)
            async with self.probe(setup) as probe:
                probe.submit(*(make_request(f"r{index}", self.prompt(5, index)) for index in range(3)))
                with pytest.raises(Overloaded, match="3") as refused:
                    probe.engine.submit(make_request("late", self.prompt(5)))
                assert refused.value.retry_after_s
                await probe.step()
                probe.submit(make_request("r3", self.prompt(5)))
                await probe.finish()

        run_async(main())

    def test_an_id_under_way_cannot_be_taken_again(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                probe.submit(make_request("a", self.prompt(5)))
                with pytest.raises(RequestError, match="under way"):
                    probe.engine.submit(make_request("a", self.prompt(6)))
                await probe.finish()
                await probe.run(make_request("a", self.prompt(6)))

        run_async(main())

    # ---- abort and deadlines --------------------------------------------------------------------------

    def test_abort_is_silent_and_frees_blocks(self) -> None:
        """In the queue, in prefill and in decode; between steps."""
        long_prompt = make_request("prefill", self.prompt(200, 1), max_tokens=20)
        decoding = make_request("decode", self.prompt(20, 2), max_tokens=_FOREVER)

        async def main() -> None:
            setup = replace(_SETUP, max_batch_tokens=32, max_running_requests=2)
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
                probe.submit(make_request("gone", self.prompt(50, 1), max_tokens=_FOREVER))
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

    def test_a_deadline_ends_requests_running_and_waiting(self) -> None:
        async def main() -> None:
            async with self.probe(replace(_SETUP, max_running_requests=2)) as probe:
                probe.submit(
                    make_request("running", self.prompt(20, 1), max_tokens=_FOREVER, deadline_s=0.2),
                    make_request("kept", self.prompt(20, 2), max_tokens=20, deadline_s=60.0),
                    make_request("waiting", self.prompt(20, 3), deadline_s=0.0),
                )
                await probe.step()
                await asyncio.sleep(0.25)
                await probe.finish()
                for request_id in ("running", "waiting"):
                    answer = probe.answers[request_id]
                    assert answer.finish_reason is FinishReason.ERROR
                    assert answer.error is not None
                    assert answer.error.code == "deadline_exceeded"
                assert len(probe.answers["running"].token_ids) < _FOREVER
                assert len(probe.answers["kept"].token_ids) == 20
                assert probe.engine.load().active_blocks == 0

        run_async(main())

    # ---- blocks ---------------------------------------------------------------------------------------

    def test_a_prefix_is_computed_once(self) -> None:
        size = _SETUP.block_size
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

    def test_hashes_of_the_request_and_of_the_engine_are_the_same(self) -> None:
        prompt = self.prompt(30)
        request = make_request("b", prompt, salt=b"s")
        hashes = block_hashes(request.token_ids, _SETUP.block_size, b"s", key=DEFAULT_KEY)

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

    def test_events_tell_what_is_cached(self) -> None:
        size = _SETUP.block_size
        setup = replace(_SETUP, kv_blocks=24, context_length=160)

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
        size = _SETUP.block_size
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

    def test_out_of_blocks_nothing_is_lost(self) -> None:
        requests = [make_request(f"r{index}", self.prompt(12, index), max_tokens=60) for index in range(8)]
        tight = replace(_SETUP, kv_blocks=20, context_length=160)

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

    def test_the_load_counts_what_is_done(self) -> None:
        async def main() -> None:
            async with self.probe(replace(_SETUP, max_batch_tokens=32, max_running_requests=2)) as probe:
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
                assert load.cached_blocks == 3 * (48 // _SETUP.block_size)

        run_async(main())

    def test_the_same_workload_gives_the_same_events(self) -> None:
        """Also of the mock engine, which is the reference for scheduling and caching."""
        setup = replace(_SETUP, kv_blocks=24, context_length=96)
        workload = make_workload(random.Random(5), requests=40, vocab_size=self.vocab_size, tokens_max=96)

        async def main() -> None:
            reference = await kv_event_trace(reference_engine(setup, self.vocab_size), workload)
            assert {kind for kind, *_ in reference} == {"stored", "removed"}
            assert await kv_event_trace(self.make_engine(setup), workload) == reference
            assert await kv_event_trace(self.make_engine(setup), workload) == reference

        run_async(main())

    def test_blocks_move_to_another_engine(self) -> None:
        size = _SETUP.block_size
        prompt = self.prompt(6 * size + 3)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)
        request = make_request("a", prompt, max_tokens=12)

        async def main() -> None:
            async with self.probe() as source, self.probe() as target:
                (expected,) = await source.run(request)
                blocks = source.engine.export_blocks(hashes)
                assert blocks.shape == (6, source.info.kv_bytes_per_block)
                assert source.engine.export_blocks(hashes[:0]).shape == (0, source.info.kv_bytes_per_block)
                assert target.engine.export_blocks(hashes).shape[0] == 0
                first = target.engine.import_blocks(hashes[:2], blocks[:2])
                second = target.engine.import_blocks(hashes[2:], blocks[2:], int(hashes[1, 0]))
                assert (first, second) == (2, 4)
                assert target.engine.import_blocks(hashes, blocks) == 6
                assert target.engine.load().active_blocks == 0
                np.testing.assert_array_equal(target.engine.export_blocks(hashes), blocks)
                (answer,) = await target.run(request)
                assert answer.cached_tokens == 6 * size
                assert answer.token_ids == expected.token_ids
                moved = [event for event in target.events if isinstance(event, BlockStored)]
                assert [event.parent_block_hash for event in moved[:2]] == [None, int(hashes[1, 0])]
                assert target.resident() == source.resident()

        run_async(main())

    def test_an_import_takes_no_more_than_fits(self) -> None:
        size = _SETUP.block_size
        prompt = self.prompt(12 * size)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)

        async def main() -> None:
            async with self.probe() as source, self.probe(replace(_SETUP, kv_blocks=10)) as target:
                await source.run(make_request("a", prompt, max_tokens=1))
                blocks = source.engine.export_blocks(hashes)
                target.submit(make_request("live", self.prompt(3 * size, 1), max_tokens=4 * size))
                await target.step()
                held = target.engine.load().active_blocks
                assert target.engine.import_blocks(hashes, blocks) == 10 - held
                await target.finish()
                assert target.resident().total() == target.engine.load().cached_blocks

        run_async(main())


def reference_engine(
    setup: EngineSetup, vocab_size: int, eos_token_ids: tuple[int, ...] = ()
) -> MovingEngine:
    """Make a mock engine that checks its block tables on every step and takes next to no time."""
    shape = RunnerInfo(
        num_blocks=setup.kv_blocks,
        block_size=setup.block_size,
        context_length=setup.context_length,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        kv_bytes_per_block=10 * setup.block_size,
    )
    scheduler = SchedulerConfig(
        max_batch_tokens=setup.max_batch_tokens,
        max_running_requests=setup.max_running_requests,
        max_waiting_requests=setup.max_waiting_requests,
    )
    return mock_engine(shape, MockConfig(speedup=1000), scheduler)
