"""Decisions as text."""

import pytest

from penstock.core.types.events import Tier
from penstock.deploy.commands.explain import _lines
from penstock.router.explain.explanation import Candidate, Explanation, Prefill, RouteReason


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
            Prefill(
                remote=True,
                local=50.6,
                prefill=45.83,
                decode=18.5,
                kv_transfer=5.0,
                local_worker="decode-1",
                prefill_worker="prefill-1",
                decode_worker="decode-1",
                setting="local_tokens_max",
            ),
            (
                "prompt by a prefill worker: prefill-1 45.8 + decode-1 13.5 + KV transfer 5.0 = 64.3 ms; alone on decode-1 50.6 ms,"
                " by router.disagg.local_tokens_max"
            ),
        ),
        (
            Prefill(remote=True, local=101.94, prefill=40.8, decode=36.61),
            "prompt by a prefill worker: prefill 40.8 + decode 36.6 = 77.4 ms; alone on one worker 101.9 ms",
        ),
        (
            Prefill(remote=False, local=66.0, prefill=40.8, decode=36.6),
            "prompt where the answer is: prefill 40.8 + decode 36.6 = 77.4 ms; alone on one worker 66.0 ms",
        ),
        (
            Prefill(remote=False, local=66.0, prefill=40.8, decode=3.6, link_setup=25.0),
            (
                "prompt where the answer is: prefill 40.8 + decode 28.6 (25.0 of it for a new link) = 69.4 ms;"
                " alone on one worker 66.0 ms"
            ),
        ),
        (
            Prefill(
                remote=True,
                local=66.0,
                prefill=40.8,
                decode=3.6,
                link_setup=25.0,
                setting="local_tokens_max",
            ),
            (
                "prompt by a prefill worker: prefill 40.8 + decode 28.6 (25.0 of it for a new link) = 69.4 ms;"
                " alone on one worker 66.0 ms, by router.disagg.local_tokens_max"
            ),
        ),
        (
            Prefill(remote=False, local=66.0, prefill=140.8, decode=3.6, setting="late_token_share"),
            (
                "prompt where the answer is: prefill 140.8 + decode 3.6 = 144.4 ms; alone on one worker 66.0 ms,"
                " by router.disagg.late_token_share"
            ),
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


def test_both_workers_of_a_plan_are_shown_with_the_alternatives():
    others = {"terms": {}, "overlap_blocks": 0, "tier_blocks": dict.fromkeys(Tier, 0)}
    candidates = tuple(
        Candidate(worker=name, cost=cost, **others) for name, cost in (("p0", 1.5), ("p1", 2.0))
    )
    prefill = Prefill(
        remote=True,
        worker="p0",
        next_worker="p1",
        reason=RouteReason.NO_PREFIX,
        num_candidates=3,
        candidates=candidates,
    )
    _, to, where, prompt, _, first, second, more, answer, _, last = _lines(explanation(prefill=prefill), "")
    assert to.startswith("to w1 (only_worker)")
    assert where == "prompt by a prefill worker: not compared by cost"
    assert prompt == "prompt to p0 (no_prefix), next p1"
    assert (first.split()[:2], second.split()[:2]) == (["p0", "1.5"], ["p1", "2"])
    assert (more, answer) == ("  and 1 more", "answer by w1")
    assert last.split()[0] == "w1"


def test_blocks_that_a_kv_transfer_brings_are_to_move():
    tiers = {**dict.fromkeys(Tier, 0), Tier.OBJECT: 4}
    chosen = Candidate(worker="w1", cost=1.0, terms={}, overlap_blocks=4, tier_blocks=tiers)
    for prefill, name in (
        (Prefill(remote=True), "to move"),
        (Prefill(remote=False), "object"),
        (None, "object"),
    ):
        *_, head, _row = _lines(explanation(candidates=(chosen,), prefill=prefill), "")
        assert head.endswith(f"cached  {name}")
