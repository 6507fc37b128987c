"""Decisions as text."""

import pytest

from penstock.core.types import Tier
from penstock.deploy.explain_command import _lines
from penstock.router.explanation import Candidate, Explanation, Prefill, RouteReason


def explanation(**fields: object) -> Explanation:
    """Make a decision between no others than the worker chosen."""
    chosen = Candidate(worker="w1", cost=1.0, terms={}, overlap_blocks=0, tier_blocks=dict.fromkeys(Tier, 0))
    usual = {
        "request_id": "a", "model": "m", "adapter": None, "policy": "random", "reason": RouteReason.ONLY_WORKER,
        "unit": "none", "worker": "w1", "next_worker": None, "request_tokens": 20, "request_blocks": 2,
        "block_size": 16, "age_s": 0.0, "num_candidates": 1, "candidates": (chosen,), "num_left_out": 0,
        "left_out": (),
    }  # fmt: skip
    return Explanation(**usual | fields)


@pytest.mark.parametrize(
    ("tokens", "blocks", "said"),
    [
        (1, 1, "1 token, 1 block of 16"),
        (20, 2, "20 tokens, 2 blocks of 16"),
        (0, 0, "0 tokens, 0 blocks of 16"),
    ],
)
def test_the_prompt_s_size_reads_well(tokens, blocks, said):
    _, prompt, *_ = _lines(explanation(request_tokens=tokens, request_blocks=blocks), "by process 7")
    assert prompt == f"to w1 (only_worker), next nobody; {said}"


@pytest.mark.parametrize(
    ("prefill", "said"),
    [
        (
            Prefill(remote=True, local=101.94, prefill=40.8, decode=36.61),
            "prompt by a prefill worker: 40.8 + 36.6 ms apart, 101.9 ms on one worker",
        ),
        (
            Prefill(remote=False, local=66.0, prefill=40.8, decode=36.6),
            "prompt where the answer is: 40.8 + 36.6 ms apart, 66.0 ms on one worker",
        ),
        (
            Prefill(remote=True, local=66.0, prefill=40.8, decode=36.6),
            "prompt by a prefill worker: 40.8 + 36.6 ms apart, 66.0 ms on one worker, past router.disagg.local_tokens_max",
        ),
        (
            Prefill(remote=False, local=66.0, prefill=40.8, decode=3.6, link_setup=25.0),
            "prompt where the answer is: 40.8 + 3.6 ms apart and 25.0 ms for a new link, 66.0 ms on one worker",
        ),
        (
            Prefill(remote=True, local=66.0, prefill=40.8, decode=3.6, link_setup=25.0),
            "prompt by a prefill worker: 40.8 + 3.6 ms apart and 25.0 ms for a new link, 66.0 ms on one worker, past router.disagg.local_tokens_max",
        ),
        (
            Prefill(remote=False, local=66.0, prefill=140.8, decode=3.6, sooner=True),
            "prompt where the answer is: 140.8 + 3.6 ms apart, 66.0 ms on one worker, its first token sooner by router.disagg.late_token_share",
        ),
        (Prefill(remote=True), "prompt by a prefill worker: not compared by cost"),
        (Prefill(remote=False, local=5.0), "prompt where the answer is: too little of it is to be computed"),
    ],
)
def test_where_the_prompt_is_computed_is_said(prefill, said):
    _, _, line, *_ = _lines(explanation(unit="ms", prefill=prefill), "by process 7")
    assert line == said


@pytest.mark.parametrize(
    ("cost", "terms", "said"),
    [
        (0.0123, {}, "0.0123"),
        (123456.0, {}, "1.235e+05"),
        (12.34, {"queue": 12.34}, "12.3"),
        (None, {}, "never"),
    ],
)
def test_numbers_of_any_size_are_read(cost, terms, said):
    chosen = Candidate(
        worker="w1", cost=cost, terms=terms, overlap_blocks=0, tier_blocks=dict.fromkeys(Tier, 0)
    )
    *_, row = _lines(explanation(candidates=(chosen,)), "by process 7")
    assert row.split()[:2] == ["w1", said]
