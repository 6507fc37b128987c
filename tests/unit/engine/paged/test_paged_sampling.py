"""The vectorised sampler against a slow one that takes one row at a time, and against the distribution it claims."""

import math
from collections import Counter

import numpy as np
import pytest

from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.engine.scheduling.sequences import SequenceTable

torch = pytest.importorskip("torch")

from penstock.engine.paged.sampling import (  # noqa: E402
    Sampler,
    SamplingColumns,
    gumbel_noise,
    noise_key,
    position_keys,
)

pytestmark = pytest.mark.engine
VOCAB_SIZE = 700  # more than the candidates that top-p looks at first
EOS = (5, 6)
SLOTS = 16


def request(name: str = "r", choice: int = 0, num_emitted: int = 0, tokens=(), **params) -> Request:
    return Request(
        request_id=name,
        model="m",
        token_ids=pack_tokens(tokens),
        sampling=SamplingParams(max_tokens=100, **params),
        choice=choice,
        num_emitted=num_emitted,
    )


def fill(table: SequenceTable, slot: int, req: Request, prompt: list[int], output: list[int]) -> None:
    known = prompt + output
    table.requests[slot] = req
    table.token_ids[slot, : len(known)] = known
    table.token_ids[slot, len(known) :] = 3  # left by another sequence; must count for nothing
    table.num_tokens[slot] = len(known)
    table.num_prompt[slot] = len(prompt)


def new_table() -> SequenceTable:
    return SequenceTable.allocate(SLOTS, 64, 16)


def sample(
    table: SequenceTable, slots: list[int], logits: torch.Tensor, columns: SamplingColumns | None = None
):
    how = (columns or SamplingColumns(EOS)).rows(table, np.array(slots, dtype=np.int32))
    return Sampler(logits.shape[1], torch.device("cpu")).sample(logits.clone(), how)


# --- one row at a time, in plain Python


def mix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def plain_noise(key: int, token_id: int) -> float:
    mask = (1 << 32) - 1
    x = (token_id * 0x9E3779B1 + (key & mask)) & mask
    x ^= x >> 16
    x = ((x * 0x85EBCA6B) & mask) ^ (key >> 32)
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & mask
    x ^= x >> 16
    return -math.log(-math.log1p(-((x & 0x7FFFFFFF) + 0.5) / 2**31))


def plain_pick(logits: list[float], req: Request, prompt: list[int], output: list[int]) -> int:
    p = req.sampling
    scores = list(logits)
    counts = Counter(output)
    for token in set(prompt + output):
        scores[token] *= p.repetition_penalty if scores[token] <= 0 else 1 / p.repetition_penalty
    for token, times in counts.items():
        scores[token] -= p.frequency_penalty * times + p.presence_penalty
    if len(output) < p.min_tokens:
        for token in p.stop_token_ids + (() if p.ignore_eos else EOS):
            scores[token] = -math.inf
    if p.temperature == 0:
        return max(range(len(scores)), key=scores.__getitem__)
    scores = [score / p.temperature for score in scores]
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: p.top_k or None]
    total = math.fsum(math.exp(scores[token] - scores[order[0]]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        share = math.exp(scores[token] - scores[order[0]])
        if kept and (mass / total >= p.top_p or share < p.min_p):
            break
        kept.append(token)
        mass += share
    key = mix64((noise_key(req) + len(output) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
    return max(kept, key=lambda token: scores[token] + plain_noise(key, token))


PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7},
    {"temperature": 1.3, "seed": -5, "top_k": 5},
    {"temperature": 1.0, "seed": 7, "top_k": 1},
    {"temperature": 2.0, "seed": 8, "top_k": 5000, "top_p": 0.5},
    {"temperature": 0.9, "seed": 9, "top_p": 0.8},
    {"temperature": 30.0, "seed": 10, "top_p": 0.95},  # nearly flat: needs more than the first candidates
    {"temperature": 1.0, "seed": 11, "min_p": 0.2},
    {"temperature": 1.0, "seed": 12, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 13, "presence_penalty": 2.0, "repetition_penalty": 0.7, "top_p": 0.9},
    {"temperature": 0.0, "min_tokens": 40, "stop_token_ids": (1, 2)},
    {"temperature": 1.0, "seed": 14, "min_tokens": 4, "ignore_eos": True, "stop_token_ids": (9,)},
    {"temperature": 0.0, "min_tokens": 3},
]


@pytest.mark.parametrize("seed", range(6))
def test_a_mixed_batch_equals_rows_taken_one_by_one(seed):
    random = np.random.default_rng(seed)
    table, columns = new_table(), SamplingColumns(EOS)
    slots = random.permutation(SLOTS)[: len(PARAMS)]
    logits = torch.from_numpy(random.normal(0, 3, (len(PARAMS), VOCAB_SIZE)).astype(np.float32))
    logits[:, EOS[0]] += 6  # tempting, so that bans matter
    logits[:, 1] += 8
    expected = []
    for row, params in enumerate(PARAMS):
        prompt, output = (
            random.integers(0, 40, 20).tolist(),
            random.integers(0, 40, random.integers(0, 30)).tolist(),
        )
        logits[row, prompt] += 3  # seen tokens are likely ones, so that penalties matter
        req = request(f"r{row}", choice=row % 3, **params)
        fill(table, int(slots[row]), req, prompt, output)
        expected.append(plain_pick(logits[row].tolist(), req, prompt, output))
    picked, _ = sample(table, slots.tolist(), logits, columns)
    assert picked.tolist() == expected
    for row in random.permutation(len(PARAMS)):  # neither the batch nor the order matters
        alone, _ = sample(table, [int(slots[row])], logits[row : row + 1], columns)
        assert alone.tolist() == [expected[row]]


def stream(req: Request, logits: torch.Tensor, start: int, count: int) -> list[int]:
    table, columns = new_table(), SamplingColumns(EOS)
    tokens = []
    for position in range(start, start + count):
        fill(table, 3, req, [1] * 9, [2] * position)
        tokens.append(int(sample(table, [3], logits[position : position + 1], columns)[0][0]))
    return tokens


@pytest.mark.parametrize("seed", [None, 0, 2**63 - 1, -1])
def test_a_moved_request_goes_on_with_its_noise(seed):
    logits = torch.randn(30, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    req = request("chat-17", seed=seed)
    moved = request("chat-17", seed=seed, num_emitted=12, tokens=[1] * 9 + [2] * 12)
    whole = stream(req, logits, 0, 30)
    assert whole == stream(req, logits, 0, 12) + stream(moved, logits, 12, 18)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["positions", "seeds", "choices"])
def test_draws_follow_the_softmax(vary):
    """Chi-square with 39 degrees of freedom exceeds 79.1 once in 10,000 times; the noise is fixed, so this repeats."""
    draws, vocab_size = 8000, 40
    scores = torch.from_numpy(np.random.default_rng(0).normal(0, 1.2, vocab_size).astype(np.float32))
    of_request = np.array(
        [
            noise_key(request(seed=index if vary == "seeds" else 4, choice=index if vary == "choices" else 0))
            for index in (range(draws) if vary != "positions" else [0])
        ],
        dtype=np.uint64,
    )
    keys = position_keys(of_request, np.arange(draws) if vary == "positions" else np.array([5]))
    noise = gumbel_noise(
        torch.from_numpy(keys.view(np.int32).reshape(-1, 2)),
        torch.arange(vocab_size, dtype=torch.int32)[None],
    )
    counts = np.bincount((scores + noise).argmax(-1).numpy(), minlength=vocab_size)
    assert chi_square(counts, draws * torch.softmax(scores, -1).numpy()) < 79.1


def test_a_request_that_cannot_be_prepared_disturbs_no_other_row():
    table, columns = new_table(), SamplingColumns(EOS)
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    usual = request("a", temperature=1.0, seed=3, top_p=0.9)
    fill(table, 4, usual, [1, 2], [3])
    alone = sample(table, [4], logits[1:2], columns)[0].tolist()
    fill(table, 2, request("big", top_k=1 << 63), [1, 2], [])
    fill(table, 3, request("greedy", temperature=0.0), [1, 2], [])
    for _ in range(2):
        picked, _ = sample(table, [2, 4, 3], logits, columns)
        assert picked[1:].tolist() == [*alone, int(logits[2].argmax())]
        assert list(columns.errors) == [0]
        assert "OverflowError" in columns.errors[0].message
    fill(table, 2, usual, [1, 2], [3])
    assert sample(table, [2], logits[1:2], columns)[0].tolist() == alone
    assert columns.errors == {}
