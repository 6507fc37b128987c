"""Core engine suite, answers: tokens, finish reasons, sampling, refusals of requests."""

from collections.abc import Iterable, Iterator
from math import inf, nan
from typing import Any

import msgspec
import pytest

from penstock.core.errors import Overloaded, RequestError
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.seams import Engine
from penstock.testing.engines.case import FOREVER, EngineCase
from penstock.testing.engines.probe import EngineProbe, make_request

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


_SET: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 2,
    "min_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "seed": 1,
    "stop_token_ids": (1,),
    "min_tokens": 2,
    "logprobs": 1,
}
"""Of each field a value that is no default."""


def _extreme_requests(
    prompt: list[int], vocab_size: int, usual: SamplingParams
) -> Iterator[tuple[str, Request]]:
    """Make (field, request) pairs; each request has one extreme value, in this field."""
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

    def test_tokens_come_before_the_answer_ends(self) -> None:
        (answer,) = self.answer(make_request("a", self.prompt(10), max_tokens=FOREVER))
        assert len(answer.token_ids) == FOREVER
        assert answer.deltas > FOREVER // 20, "tokens are to be streamed as they are sampled"

    def test_the_context_ends_an_answer(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                prompt = self.prompt(probe.info.context_length - 10)
                (answer,) = await probe.run(make_request("a", prompt, max_tokens=FOREVER))
                assert len(answer.token_ids) == 10
                assert answer.finish_reason is FinishReason.LENGTH

        self.run(main())

    def test_requests_do_not_disturb_each_other(self) -> None:
        requests = [
            make_request(f"r{index}", self.prompt(5 + 9 * index, seed=index), max_tokens=6 + index)
            for index in range(10)
        ]
        together = self.answer(*requests)
        alone = [self.answer(request)[0].token_ids for request in requests]
        assert [len(answer.token_ids) for answer in together] == [6 + index for index in range(10)]
        self.check_equal(together, alone)

    def test_a_stop_token_ends_an_answer(self) -> None:
        self.needs("stop_token_ids")
        prompt = self.prompt(10)
        (whole,) = self.answer(make_request("a", prompt, max_tokens=20))
        stop = whole.token_ids[9]
        end = whole.token_ids.index(stop) + 1
        sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
        (answer,) = self.answer(make_request("a", prompt, sampling=sampling))
        assert answer.token_ids == whole.token_ids[:end]
        assert answer.finish_reason is FinishReason.STOP

    def test_no_stop_before_min_tokens(self) -> None:
        self.needs("min_tokens", "stop_token_ids")
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
        """Where the engine does not promise that of sampled tokens, the answer has its length all the same."""
        prompt = self.prompt(20)
        sampled = SamplingParams(
            max_tokens=24, temperature=1.0, seed=7, ignore_eos=True, frequency_penalty=0.5
        )
        for sampling in (SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True), sampled):
            (whole,) = self.answer(make_request("a", prompt, sampling=sampling, choice=1))
            for done in (1, 7, 23):
                request = make_request(
                    "a", prompt + whole.token_ids[:done], sampling=sampling, choice=1, num_emitted=done
                )
                (rest,) = self.answer(request)
                assert len(rest.token_ids) == 24 - done
                assert rest.finish_reason is FinishReason.LENGTH
                if self.token_exact_migration:
                    assert rest.token_ids == whole.token_ids[done:]
                elif sampling is not sampled:
                    self.check_equal([rest], [whole.token_ids[done:]])

    def test_choices_differ_and_repeat(self) -> None:
        sampling = SamplingParams(max_tokens=16, temperature=1.0, seed=3, ignore_eos=True)
        prompt = self.prompt(12)

        def ask(choice: int) -> Request:
            return make_request(f"c{choice}", prompt, sampling=sampling, choice=choice)

        first = [answer.token_ids for answer in self.answer(ask(0), ask(1), ask(2))]
        assert len({tuple(token_ids) for token_ids in first}) == 3
        again = [self.answer(ask(choice))[0].token_ids for choice in range(3)]
        assert first == again or not self.repeats_seeds

    def test_requests_for_logprobs_get_them_with_every_token(self) -> None:
        self.needs("logprobs")

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
            async with self.probe() as probe:
                limit = probe.info.context_length
                for request, what in (
                    (make_request("a", self.prompt(limit)), str(limit)),
                    (make_request("a", []), "token_ids"),
                    (make_request("a", [0, self.vocab_size]), str(self.vocab_size)),
                    (make_request("a", [0, -1]), "-1"),
                    (make_request("a", self.prompt(5), max_tokens=0), "max_tokens"),
                    (make_request("a", self.prompt(5), max_tokens=2, num_emitted=2), "max_tokens"),
                    (make_request("a", self.prompt(5), num_emitted=5), "num_emitted"),
                ):
                    with pytest.raises(RequestError, match=what):
                        probe.engine.submit(request)
                (answer,) = await probe.run(make_request("a", self.prompt(limit - 1)))
                assert len(answer.token_ids) == 1

        self.run(main())

    def test_unsupported_fields_are_refused_by_name(self) -> None:
        """One that is set; a request that leaves it alone is served."""

        async def main() -> None:
            async with self.probe() as probe:
                for field in sorted(self.unsupported):
                    sampling = msgspec.structs.replace(self._usual, **{field: _SET[field]})
                    request = make_request(field, self.prompt(6), sampling=sampling)
                    assert await self._refused(probe, request, field), f"{field} is served"
                (answer,) = await probe.run(make_request("served", self.prompt(6)))
                assert answer.error is None

        if not self.unsupported:
            pytest.skip("supports every field")
        self.run(main())

    def test_extreme_values_are_refused_or_served_without_effect_on_others(self) -> None:
        """A refusal names the field, and an accepted request is answered; concurrent requests are not affected."""
        innocent = [make_request("greedy", self.prompt(20, 1), max_tokens=150)]
        if self.repeats_seeds and not self.unsupported:
            sampling = SamplingParams(
                max_tokens=150, temperature=0.8, seed=5, top_p=0.9, ignore_eos=True, min_tokens=3, logprobs=1
            )
            innocent.append(make_request("random", self.prompt(20, 2), sampling=sampling))
        alone = [self.answer(request)[0].token_ids for request in innocent]
        extremes = list(_extreme_requests(self.prompt(6, 3), self.vocab_size, self._usual))

        async def main() -> None:
            async with self.probe() as probe:
                probe.submit(*innocent)
                for field, request in extremes:
                    await self._refused(probe, request, field)
                await probe.finish()
                for request_id, answer in probe.answers.items():
                    if answer.error is not None and self.refuses_late:
                        field = request_id.partition("=")[0]
                        assert answer.error.code == RequestError.code, answer.error
                        assert field in answer.error.message, (
                            f"{field}: refused with {answer.error.message!r}"
                        )
                        continue
                    assert answer.error is None, f"{request_id}: {answer.error}"
                    assert answer.token_ids, request_id
                self.check_equal([probe.answers[request.request_id] for request in innocent], alone)
                await self.check_idle(probe)

        self.run(main())

    @property
    def _usual(self) -> SamplingParams:
        """Sampling with values of which none is extreme or refused."""
        usual = SamplingParams(max_tokens=3, temperature=1.0)
        fields = {"min_tokens", "seed"} - self.unsupported
        return msgspec.structs.replace(usual, **dict.fromkeys(fields, 1))

    async def _refused(self, probe: EngineProbe[Engine], request: Request, field: str) -> bool:
        """Submit a request, where the queue is full once it is not; say whether it was refused for this field."""
        while True:
            try:
                probe.submit(request)
            except Overloaded:
                await probe.step()
                continue
            except RequestError as refused:
                assert field in refused.message, f"{field}: refused with {refused.message!r}"  # noqa: PT017
                return True
            break
        if probe.is_busy:
            await probe.step()
        if self.refuses_late and field in self.unsupported:
            await probe.finish()
            error = probe.answers[request.request_id].error
            return error is not None and error.code == RequestError.code and field in error.message
        return False
