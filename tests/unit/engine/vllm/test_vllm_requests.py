from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.core.errors import RequestError
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.engine.vllm.load import LoadCounts
from penstock.engine.vllm.requests import Running, check_tokens, delta_of, sampling_arguments


def request(*, num_emitted: int = 0, choice: int = 0, expected: int = 0, **sampling: Any) -> Request:
    return Request(
        request_id="r",
        model="m",
        token_ids=pack_tokens(range(100)),
        sampling=SamplingParams(**{"max_tokens": 20} | sampling),
        num_emitted=num_emitted,
        choice=choice,
        expected_cached_tokens=expected,
    )


def output(*token_ids: int, **fields: Any) -> SimpleNamespace:
    given = {"finish_reason": None, "new_logprobs": None, "prefill_stats": None, "events": None}
    return SimpleNamespace(new_token_ids=list(token_ids), **given | fields)


def test_tokens_emitted_elsewhere_shorten_the_answer() -> None:
    moved = sampling_arguments(request(num_emitted=5, min_tokens=8))
    assert (moved["max_tokens"], moved["min_tokens"]) == (15, 3)
    assert sampling_arguments(request(num_emitted=9, min_tokens=8))["min_tokens"] == 0
    assert sampling_arguments(request(min_tokens=30))["min_tokens"] == 20, "vLLM refuses more than max_tokens"
    with pytest.raises(
        RequestError, match="max_tokens: must be more than the 20 tokens emitted so far, got 20"
    ):
        sampling_arguments(request(num_emitted=20))


def test_numbers_are_kept_within_what_can_be_sent_to_vllms_core() -> None:
    huge = sampling_arguments(request(max_tokens=1 << 64, min_tokens=1 << 65, top_k=1 << 64))
    assert (huge["max_tokens"], huge["min_tokens"], huge["top_k"]) == ((1 << 31) - 1,) * 3
    assert sampling_arguments(request(top_k=None))["top_k"] == 0


def test_choices_of_one_seed_differ() -> None:
    assert sampling_arguments(request())["seed"] is None
    assert sampling_arguments(request(seed=7, choice=2))["seed"] == 9
    assert sampling_arguments(request(seed=7, num_emitted=2))["seed"] not in {7, 9}, (
        "not the start's noise again"
    )
    assert sampling_arguments(request(seed=7, seed_drawn=True))["seed"] is None, "sampled as one batch"
    assert sampling_arguments(request(seed=-1))["seed"] == (1 << 63) - 1, "vLLM takes -1 for none"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (None, None),
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("repetition", FinishReason.STOP),
        ("error", FinishReason.ERROR),
        ("abort", FinishReason.ERROR),
    ],
)
def test_finish_reasons(reason: str | None, expected: FinishReason | None) -> None:
    delta = delta_of(Running.of(request(), 0.0), output(4, 5, finish_reason=reason))
    assert unpack_tokens(delta.token_ids).tolist() == [4, 5]
    assert delta.finish_reason == expected
    assert (delta.error is not None) == (expected is FinishReason.ERROR)
    if delta.error is not None:
        assert delta.error.code == "step_failed", "routers try it elsewhere"


def test_only_the_first_delta_says_what_was_cached() -> None:
    running, counts = Running.of(request(), 0.0), LoadCounts()
    stats = SimpleNamespace(num_cached_tokens=64, num_computed_tokens=36)
    first = output(4, prefill_stats=stats)
    assert delta_of(running, first).cached_tokens == 64
    counts.count(running, first)
    assert delta_of(running, output(5)).cached_tokens is None


def test_logprobs_are_rows_that_begin_with_the_sampled_token() -> None:
    lists = SimpleNamespace(
        logprob_token_ids=np.array([[7, 9, 7]]), logprobs=np.array([[-1.5, -0.5, -1.5]], dtype=np.float32)
    )
    for number, top in ((2, ((9, -0.5), (7, -1.5))), (1, ((9, -0.5),)), (0, ())):
        running = Running.of(request(logprobs=number), 0.0)
        (entry,) = delta_of(running, output(7, new_logprobs=lists)).logprobs
        assert (entry.token_id, entry.logprob, entry.top) == (7, -1.5, top), (
            "others of the batch ask for more"
        )
    assert delta_of(Running.of(request(), 0.0), output(7)).logprobs == ()


@pytest.mark.parametrize(
    ("token_ids", "num_emitted", "message"),
    [
        ([], 0, "token_ids: must be at least one id"),
        ([1, 512], 0, "token id 512: must be >= 0 and < 512"),
        ([1, -1], 0, "token id -1: must be"),
        ([1, 2], 2, "num_emitted: must be >= 0 and < 2, all tokens, got 2"),
        ([1, 2], -1, "num_emitted: .* got -1"),
    ],
)
def test_tokens_that_vllm_would_refuse_otherwise_are_refused_by_field(
    token_ids, num_emitted, message
) -> None:
    wrong = msgspec.structs.replace(request(num_emitted=num_emitted), token_ids=pack_tokens(token_ids))
    with pytest.raises(RequestError, match=message):
        check_tokens(wrong, 512)
    check_tokens(request(), 512)


def test_the_load_counts_what_vllm_has_not_said_yet() -> None:
    counts = LoadCounts(total_blocks=50)
    first, second = Running.of(request(expected=64), 1.0), Running.of(request(), 3.0)
    waiting = counts.load([first, second], now_s=4.0)
    assert (waiting.running_requests, waiting.waiting_requests, waiting.queued_prefill_tokens) == (0, 2, 136)
    assert (waiting.oldest_wait_s, waiting.context_tokens) == (3.0, 0)
    preempted = SimpleNamespace(type=3)
    counts.count(first, output(1, events=[SimpleNamespace(type=1), preempted]))
    counts.stepped(SimpleNamespace(num_running_reqs=2, kv_cache_usage=0.1, kv_connector_stats=None))
    both = counts.load([first, second], now_s=4.0)
    assert (both.running_requests, both.waiting_requests, both.active_blocks) == (2, 0, 5)
    assert (both.context_tokens, both.queued_prefill_tokens) == (101, 100)
    assert (both.steps, both.preemptions, both.generated_tokens) == (1, 1, 1)
    assert counts.load([], now_s=4.0).active_blocks == 0
