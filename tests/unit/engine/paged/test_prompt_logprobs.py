"""Logprobs of prompts: those of transformers, whatever the chunks, the cache, preemption and moves."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock.core.wire import unpack_tokens  # noqa: E402
from penstock.engine.paged import runner as module  # noqa: E402

pytestmark = pytest.mark.engine


def rows_of(parts):
    """Join the parts of one request: (n, 1 + alternatives) token ids and logprobs, and (n,) ranks."""
    position = parts[0].start
    for part in parts:
        assert part.start <= position, "a token is left out"
        position = part.end
    position, joined = parts[0].start, []
    for part in parts:
        rest = part.after(position)
        position = rest.end
        if not (count := len(rest.ranks) // 4):
            continue
        joined.append(
            (
                unpack_tokens(rest.token_ids).reshape(count, -1),
                np.frombuffer(rest.logprobs, "<f4").reshape(count, -1),
                unpack_tokens(rest.ranks),
            )
        )
    return [np.concatenate(column) for column in zip(*joined, strict=True)]


@pytest.fixture
def expected(checkpoint):
    """Give (n, vocabulary) logprobs of a prompt's tokens but the first, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    def compute(architecture, prompt):
        model = AutoModelForCausalLM.from_pretrained(checkpoint(architecture), dtype=torch.float32).eval()
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], -1).numpy()

    return compute


def check(parts, prompt, logprobs, alternatives):
    token_ids, values, ranks = rows_of(parts)
    assert parts[0].start == 1
    assert token_ids[:, 0].tolist() == prompt[1:]
    at = np.arange(len(prompt) - 1)
    np.testing.assert_allclose(values[:, 0], logprobs[at, prompt[1:]], atol=1e-4)
    best = -np.sort(-logprobs, axis=1)[:, :alternatives]
    np.testing.assert_allclose(values[:, 1:], best, atol=1e-4)
    np.testing.assert_allclose(values[:, 1:], np.take_along_axis(logprobs, token_ids[:, 1:], 1), atol=1e-4)
    wrong = np.abs(ranks - ((logprobs > logprobs[at, prompt[1:]][:, None]).sum(1) + 1))
    assert wrong.max() <= 1, "near-equal logits may swap"


@pytest.mark.parametrize(
    ("architecture", "alternatives"),
    [("llama", 0), ("gemma3", 3), pytest.param("qwen3", 3, marks=pytest.mark.nightly)],
)
def test_they_are_those_of_transformers(engine, reference, new_request, expected, architecture, alternatives):
    prompt = max(reference(architecture).prompts, key=len)
    made = engine(architecture, block_size=4 if architecture == "gemma3" else 8)
    made.run(new_request("a", prompt, 3, prompt_logprobs=alternatives))
    check(made.prompt_logprobs["a"], prompt, expected(architecture, prompt), alternatives)


def test_chunks_and_company_change_nothing(engine, reference, new_request, expected, monkeypatch):
    prompts = reference("llama").prompts[:6]
    monkeypatch.setattr(module, "_LOGITS_BYTES", 1 << 12)  # a few rows together
    made = engine(max_batch_tokens=24)
    tokens = made.run(
        *(new_request(f"a{i}", prompt, 5, prompt_logprobs=i % 3) for i, prompt in enumerate(prompts)),
        *(new_request(f"b{i}", prompt, 5) for i, prompt in enumerate(prompts)),
    )
    assert made.chunks > 3
    for i, prompt in enumerate(prompts):
        check(made.prompt_logprobs[f"a{i}"], prompt, expected("llama", prompt), i % 3)
        assert f"b{i}" not in made.prompt_logprobs
        assert tokens[f"a{i}"] == tokens[f"b{i}"]


def test_a_cached_prefix_is_computed_again_and_stays_cached(engine, reference, new_request, expected):
    prompt = max(reference("llama").prompts, key=len)
    made = engine(max_batch_tokens=40)
    made.run(new_request("a", prompt))
    cached = made.pool.num_cached
    made.run(new_request("b", prompt, prompt_logprobs=1))
    assert made.tokens["a"] == made.tokens["b"]
    check(made.prompt_logprobs["b"], prompt, expected("llama", prompt), 1)
    assert made.scheduler.load().prefix_hit_tokens == 0
    made.run(new_request("c", prompt))
    assert made.scheduler.load().prefix_hit_tokens == (len(prompt) - 1) // 8 * 8
    assert made.pool.num_cached == cached


@pytest.mark.parametrize("known", [0, 1, 9, 40])
def test_what_the_client_has_is_left_out(engine, reference, new_request, expected, known):
    prompt = max(reference("llama").prompts, key=len)
    made = engine()
    made.run(new_request("a", prompt))
    request = new_request("b", prompt, prompt_logprobs=2, prompt_logprobs_from=known)
    made.run(request)
    parts = made.prompt_logprobs["b"]
    assert parts[0].start == max((known - 1) // 8 * 8 + 1, 1) <= max(known, 1)
    token_ids, values, _ = rows_of(parts)
    logprobs = expected("llama", prompt)[parts[0].start - 1 :]
    np.testing.assert_allclose(
        values[:, 0], np.take_along_axis(logprobs, token_ids[:, :1], 1)[:, 0], atol=1e-4
    )
    assert parts[-1].end == len(prompt)
