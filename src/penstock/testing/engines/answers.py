"""Engine suite, answers: tokens, finish reasons, refusals."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf, nan
from typing import Any

import msgspec
import pytest

from penstock.core.errors import Overloaded, RequestError
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.testing.engines.case import FOREVER, SETUP, EngineCase
from penstock.testing.engines.probe import Answer, make_request
from penstock.testing.loop import run_async

_FLOATS = (nan, inf, -inf, -1.0, 0.0, 1e-300, 1.0, 2.0, 1e300)
_INTEGERS = (-(1 << 64), -(1 << 63), -1, 0, 1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64)
_EXTREMES: dict[str, tuple[Any, ...]] = {
    "max_tokens": _INTEGERS,
    "temperature": _FLOATS,
    "top_p": _FLOATS,
    "top_k": _INTEGERS,
    "min_p": _FLOATS,
    "presence_penalty": _FLOATS,
    "frequency_penalty": _FLOATS,
    "repetition_penalty": _FLOATS,
    "seed": _INTEGERS,
    "stop_token_ids": tuple((number,) for number in _INTEGERS),
    "min_tokens": _INTEGERS,
    "logprobs": _INTEGERS,
    "choice": _INTEGERS,
    "num_emitted": _INTEGERS,
}


def _extreme_requests(prompt: list[int], vocab_size: int) -> Iterator[tuple[str, Request]]:
    """Make (field, request) pairs; each request has one extreme value, in this field."""
    usual = SamplingParams(max_tokens=3, min_tokens=1, temperature=1.0, seed=1)
    for field, values in _EXTREMES.items():
        for value in (*values, (vocab_size,)) if field == "stop_token_ids" else values:
            request = make_request(f"{field}={value}", prompt, sampling=usual)
            if field in SamplingParams.__struct_fields__:
                sampling = msgspec.structs.replace(usual, **{field: value})
                yield field, msgspec.structs.replace(request, sampling=sampling)
            else:
                yield field, msgspec.structs.replace(request, **{field: value})


class EngineAnswers(EngineCase):
    """Tests of the answers that an engine gives."""

    def test_an_answer_has_as_many_tokens_as_asked_for(self) -> None:
        for max_tokens in (1, 2, 7):
            (answer,) = self.answer(make_request("a", self.prompt(10), max_tokens=max_tokens))
            assert len(answer.token_ids) == max_tokens
            assert answer.finish_reason is FinishReason.LENGTH
            assert all(0 <= token_id < self.vocab_size for token_id in answer.token_ids)

    def test_the_context_ends_an_answer(self) -> None:
        setup = replace(SETUP, context_length=40)
        (answer,) = self.answer(make_request("a", self.prompt(30), max_tokens=FOREVER), setup=setup)
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
        setup = replace(SETUP, max_batch_tokens=16)

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
            == self.answer(request, setup=replace(SETUP, max_batch_tokens=256))[0].token_ids
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

    def test_an_end_of_sequence_token_ends_an_answer_unless_ignored(self) -> None:
        if not self.eos_token_ids:
            pytest.skip("the model has no end-of-sequence token")

        def requests(numbers: Iterable[int], *, ignore_eos: bool) -> list[Request]:
            sampling = SamplingParams(max_tokens=150, temperature=1.0, seed=1, ignore_eos=ignore_eos)
            return [make_request(f"r{i}", self.prompt(8, i), sampling=sampling) for i in numbers]

        heeding = self.answer(*requests(range(16), ignore_eos=False))
        stopped = [i for i, answer in enumerate(heeding) if answer.finish_reason is FinishReason.STOP]
        assert stopped, "no answer met an end-of-sequence token: choose a model where some do"
        for answer in heeding:
            ends = [token in self.eos_token_ids for token in answer.token_ids]
            assert not any(ends[:-1])
            assert ends[-1] == (answer.finish_reason is FinishReason.STOP)
        for answer in self.answer(*requests(stopped[:8], ignore_eos=True)):
            assert answer.finish_reason is FinishReason.LENGTH
            assert len(answer.token_ids) == 150

    def test_a_request_moved_to_another_engine_continues_with_the_same_tokens(self) -> None:
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

    def test_requests_for_logprobs_get_them_with_every_token(self) -> None:
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

    def test_what_can_never_run_is_refused(self) -> None:
        async def main() -> None:
            setup = replace(SETUP, context_length=64)
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

    def test_extreme_values_are_refused_or_served_without_effect_on_others(self) -> None:
        """A refusal names the field, and an accepted request is answered; concurrent requests are not affected."""
        setup = replace(SETUP, max_batch_tokens=32)
        innocent = [
            make_request("greedy", self.prompt(20, 1), max_tokens=150),
            make_request(
                "random",
                self.prompt(20, 2),
                sampling=SamplingParams(
                    max_tokens=150,
                    temperature=0.8,
                    seed=5,
                    top_p=0.9,
                    ignore_eos=True,
                    min_tokens=3,
                    logprobs=1,
                ),
            ),
        ]
        alone = self.answer(*innocent, setup=setup)
        extremes = list(_extreme_requests(self.prompt(6, 3), self.vocab_size))

        async def main() -> None:
            async with self.probe(setup) as probe:
                probe.submit(*innocent)
                for field, request in extremes:
                    try:
                        probe.submit(request)
                    except RequestError as refused:
                        assert field in refused.message, f"{field}: refused with {refused.message!r}"  # noqa: PT017
                    await probe.step()
                await probe.finish()
                for request_id, answer in probe.answers.items():
                    assert answer.error is None, f"{request_id}: {answer.error}"
                    assert answer.token_ids, request_id
                for request, expected in zip(innocent, alone, strict=True):
                    assert probe.answers[request.request_id].token_ids == expected.token_ids
                assert probe.engine.load().active_blocks == 0

        run_async(main())

    def test_a_request_larger_than_all_blocks_is_refused(self) -> None:
        async def main() -> None:
            async with self.probe(replace(SETUP, kv_blocks=8)) as probe:
                assert probe.info.context_length == 8 * SETUP.block_size
                with pytest.raises(RequestError, match="KV blocks"):
                    probe.engine.submit(make_request("a", self.prompt(8 * SETUP.block_size)))
                (answer,) = await probe.run(make_request("a", self.prompt(40), max_tokens=FOREVER))
                assert len(answer.token_ids) == 8 * SETUP.block_size - 40

        run_async(main())

    def test_a_full_queue_refuses(self) -> None:
        async def main() -> None:
            setup = replace(SETUP, max_running_requests=1, max_waiting_requests=3)
            async with self.probe(setup) as probe:
                probe.submit(*(make_request(f"r{index}", self.prompt(5, index)) for index in range(3)))
                with pytest.raises(Overloaded, match="3") as refused:
                    probe.engine.submit(make_request("late", self.prompt(5)))
                assert refused.value.retry_after_s
                await probe.step()
                probe.submit(make_request("r3", self.prompt(5)))
                await probe.finish()

        run_async(main())

    def test_the_id_of_an_unfinished_request_is_refused(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                probe.submit(make_request("a", self.prompt(5)))
                with pytest.raises(RequestError, match="under way"):
                    probe.engine.submit(make_request("a", self.prompt(6)))
                await probe.finish()
                await probe.run(make_request("a", self.prompt(6)))

        run_async(main())
