"""vLLM's engine behind Penstock's: outputs, limits, aborts, migration and load, on one shared engine."""

from itertools import count

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.core.errors import RequestError
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.core.wire import pack_tokens, unpack_tokens

_numbers = count()


@pytest.fixture(scope="module")
def model(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 400, length).tolist()


def request_of(token_ids, **fields):
    sampling = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    own = {
        name: fields.pop(name)
        for name in ("num_emitted", "salt", "choice", "priority", "prefill_only")
        if name in fields
    }
    return Request(
        request_id=f"r{next(_numbers)}",
        model="tiny",
        token_ids=pack_tokens(token_ids),
        sampling=SamplingParams(**sampling | fields),
        **own,
    )


def greedy(model, token_ids, tokens):
    """Continue greedily; `generate` with `min_new_tokens` would forbid the end token."""
    torch.set_num_threads(1)
    ids = list(token_ids)
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(token_ids) :]


def test_greedy_output_of_eight_concurrent_prompts_is_that_of_transformers(running, model):
    prompts = [prompt(20 + 23 * seed, seed) for seed in range(8)]
    answers = running.answers(*(request_of(ids, max_tokens=24) for ids in prompts))
    assert [answer.token_ids for answer in answers] == [greedy(model, ids, 24) for ids in prompts]
    assert {answer.finish_reason for answer in answers} == {FinishReason.LENGTH}


def test_an_aborted_request_leaves_nothing(running):
    long = request_of(prompt(100, 60), max_tokens=300)
    answer = running.answers(long, steps=5)[0]
    load = running.load()
    assert answer.token_ids
    assert (load.running_requests, load.active_blocks >= 4, load.context_tokens >= 100) == (1, True, True)
    running.abort(long.request_id)
    running.abort(long.request_id)
    load = running.load()
    assert (load.running_requests, load.waiting_requests, load.active_blocks) == (0, 0, 0)
    again = running.answers(long, steps=3)[0]  # the same id at once
    assert again.cached_tokens == 96
    running.abort(long.request_id)
    assert running.answers(request_of(prompt(30, 61)))[0].finish_reason is FinishReason.LENGTH
    assert running.load().active_blocks == 0


def test_logprobs_are_those_of_the_model(running, model):
    ids = prompt(40, 70)
    answer = running.answers(request_of(ids, logprobs=3, max_tokens=4))[0]
    with torch.inference_mode():
        logits = model(torch.tensor([ids + answer.token_ids])).logits[0, len(ids) - 1 : -1]
    for entry, row, token in zip(answer.logprobs, logits.log_softmax(-1), answer.token_ids, strict=True):
        expected = row.topk(3)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert [token_id for token_id, _ in entry.top] == expected.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected.values.tolist(), abs=1e-3)
    bare = running.answers(request_of(ids, logprobs=0, max_tokens=1))[0]
    assert [entry.top for entry in bare.logprobs] == [()]


@pytest.mark.parametrize("known", [pytest.param(0, marks=pytest.mark.nightly), 20])
def test_prompt_logprobs_are_those_of_the_model(running, model, known):
    ids = prompt(60, 71)
    running.answers(request_of(ids, max_tokens=1))  # cached, and computed again
    asked = request_of(ids, prompt_logprobs=2, prompt_logprobs_from=known, max_tokens=2)
    answer = running.answers(asked)[0]
    (part,) = answer.prompt_logprobs
    assert (part.start, part.end) == (max(known, 1), len(ids))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)[part.start - 1 :]
    token_ids = unpack_tokens(part.token_ids).reshape(-1, 3)
    values = np.frombuffer(part.logprobs, "<f4").reshape(-1, 3)
    assert token_ids[:, 0].tolist() == ids[part.start :]
    at = torch.from_numpy(token_ids.astype(np.int64))
    np.testing.assert_allclose(values, expected.gather(1, at).numpy(), atol=1e-3)
    np.testing.assert_allclose(values[:, 1:], expected.topk(2).values.numpy(), atol=1e-3)
    ranks = unpack_tokens(part.ranks)
    assert ((values[:, 0] == values[:, 1]) == (ranks == 1)).all()


def test_what_vllm_refuses_is_the_callers_error(running):
    ids = prompt(20, 100)
    with pytest.raises(RequestError, match=r"temperature must be in \[0, 2\], got 3") as refused:
        running.answers(request_of(ids, temperature=3.0))
    assert refused.value.param == "temperature"
    with pytest.raises(RequestError, match="maximum model length of 512"):
        running.answers(request_of(prompt(600, 1)))
    assert running.load().waiting_requests == 0


def test_a_greedy_request_continues_exactly_after_a_migration(running):
    ids = prompt(90, 110)
    whole = running.answers(request_of(ids, max_tokens=40))[0]
    moved = running.answers(request_of(ids + whole.token_ids[:17], num_emitted=17, max_tokens=40))[0]
    assert moved.token_ids == whole.token_ids[17:]
    assert moved.finish_reason is FinishReason.LENGTH
