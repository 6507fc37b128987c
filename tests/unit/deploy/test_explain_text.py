"""Decisions as text."""

import pytest

from penstock.core.types import Tier
from penstock.deploy.explain_command import _lines
from penstock.router.explanation import Candidate, Explanation, RouteReason


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
    ("blocks", "said"), [(1, "1 block of 16"), (2, "2 blocks of 16"), (0, "0 blocks of 16")]
)
def test_the_prompt_s_size_reads_well(blocks, said):
    _, prompt, *_ = _lines(explanation(request_blocks=blocks), "by process 7")
    assert prompt == f"to w1 (only_worker), next nobody; 20 tokens, {said}"
