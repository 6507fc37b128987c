from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import RequestError
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.engine.scheduling.sequences import checked_tokens
from penstock.engine.vllm.requests import LoadCounts, VllmRequest, delta_of, sampling_arguments


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
    usual = {"finish_reason": None, "new_logprobs": None, "prefill_stats": None, "events": None}
    return SimpleNamespace(new_token_ids=list(token_ids), **usual | fields)


def test_tokens_emitted_elsewhere_shorten_the_answer() -> None:
    moved = sampling_arguments(request(num_emitted=5, min_tokens=8))
    assert (moved["max_tokens"], moved["min_tokens"]) == (15, 3)
    assert sampling_arguments(request(num_emitted=9, min_tokens=8))["min_tokens"] == 0
    assert sampling_arguments(request(min_tokens=30))["min_tokens"] == 20, "vLLM refuses more than max_tokens"


def test_ends_that_vllm_does_not_know_stop_an_answer_too() -> None:
    stops = [
        sampling_arguments(request(stop_token_ids=(9,), ignore_eos=ignore), (7, 9))
        for ignore in (False, True)
    ]
    assert [each["stop_token_ids"] for each in stops] == [[9, 7], [9]]


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
    delta = delta_of(VllmRequest.of(request(), 0.0), output(4, 5, finish_reason=reason))
    assert unpack_tokens(delta.token_ids).tolist() == [4, 5]
    assert delta.finish_reason == expected
    assert (delta.error is not None) == (expected is FinishReason.ERROR)
    if delta.error is not None:
        assert delta.error.code == "step_failed", "routers try it elsewhere"


@pytest.mark.parametrize(
    ("token_ids", "num_emitted", "message"),
    [
        ([], 0, "token_ids: must be int32 ids, at least one"),
        ([1, 512], 0, "token id 512: must be >= 0 and < 512"),
        ([1, -1], 0, "token id -1: must be"),
        ([1, 2], 2, "num_emitted: must be >= 0 and < 2, all tokens, got 2"),
        ([1, 2], -1, "num_emitted: .* got -1"),
        ([1] * 30, 20, "max_tokens: must be > 20, what was emitted already, got 20"),
    ],
)
def test_tokens_that_vllm_would_refuse_otherwise_are_refused_by_field(
    token_ids, num_emitted, message
) -> None:
    wrong = msgspec.structs.replace(request(num_emitted=num_emitted), token_ids=pack_tokens(token_ids))
    with pytest.raises(RequestError, match=message):
        checked_tokens(wrong, 512)
    checked_tokens(request(), 512)


def test_the_load_counts_what_vllm_has_not_said_yet() -> None:
    counts = LoadCounts(total_blocks=50)
    first, second = VllmRequest.of(request(expected=64), 1.0), VllmRequest.of(request(), 3.0)
    counts.begin("first", first)
    counts.begin("second", second)
    waiting = counts.load(now_s=4.0)
    assert (waiting.running_requests, waiting.waiting_requests, waiting.queued_prefill_tokens) == (0, 2, 136)
    assert (waiting.oldest_wait_s, waiting.context_tokens) == (3.0, 0)
    preempted = SimpleNamespace(type=3)
    counts.count(first, output(1, request_id="first", events=[SimpleNamespace(type=1), preempted]))
    counts.stepped(SimpleNamespace(num_running_reqs=2, kv_cache_usage=0.1, kv_connector_stats=None))
    both = counts.load(now_s=4.0)
    assert (both.running_requests, both.waiting_requests, both.active_blocks) == (2, 0, 5)
    assert (both.context_tokens, both.queued_prefill_tokens, both.oldest_wait_s) == (101, 100, 1.0)
    assert (both.steps, both.preemptions, both.generated_tokens) == (1, 1, 1)
    counts.count(first, output(1, 2, request_id="first"))
    counts.end("first", first)
    counts.end("second", second)
    assert counts.load(now_s=4.0) == LoadCounts(
        total_blocks=50, steps=1, preemptions=1, generated_tokens=3, scheduled=2, usage=0.1
    ).load(now_s=4.0)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["begin", "count", "end"])), max_size=60))
def test_the_load_is_that_of_the_requests_under_way(steps: list[tuple[int, str]]) -> None:
    counts, under_way = LoadCounts(), dict[str, VllmRequest]()
    for now, (number, what) in enumerate(steps):
        name = f"r{number}"
        running = under_way.get(name)
        if what == "begin" and running is None:
            under_way[name] = running = VllmRequest.of(request(expected=10 * number), float(now))
            counts.begin(name, running)
        elif what == "count" and running is not None:
            counts.count(running, output(1, request_id=name))
        elif what == "end" and running is not None:
            counts.end(name, under_way.pop(name))
    load, every = counts.load(now_s=100.0), under_way.values()
    started = [each for each in every if each.has_output]
    waiting = [each for each in every if not each.has_output]
    assert (load.running_requests, load.waiting_requests) == (len(started), len(waiting))
    assert load.context_tokens == sum(each.num_tokens for each in started)
    assert load.queued_prefill_tokens == sum(each.missing for each in waiting)
    assert load.oldest_wait_s == max((100.0 - each.arrived_s for each in waiting), default=0.0)
