"""What kv-peers makes of its runs."""

import pytest

from benchmarks.kv.peers import Pair, judge
from benchmarks.processes.chats import Answer


def pair(talks_s, document_s=0.1, *, words="same", tokens=100):
    def answers(ttft_s):
        return [Answer(text=words, ttft_s=ttft_s, prompt_tokens=10, cached_tokens=5)]

    return Pair({"talks": answers(talks_s), "document": answers(document_s)}, tokens, 0)


def runs(**changed):
    usual = {
        "in_turn_off": pair(0.1, tokens=0),
        "in_turn_on": pair(0.06),
        "in_turn_tcp": pair(0.07),
        "kv_off": pair(0.05, tokens=0),
        "kv_on": pair(0.05, tokens=0),
    }
    return {name: [one] for name, one in (usual | changed).items()}


def test_workers_that_gain_have_no_problems():
    figures, problems = judge(runs())
    assert problems == []
    assert figures["ttft_ratio_talks_in_turn_on"] == pytest.approx(0.6)
    assert figures["ttft_ratio_document_kv_on"] == pytest.approx(1.0)
    assert figures["cached_share_talks_kv_on"] == 0.5


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kv_on": pair(0.06)}, "TTFT of talks at kv_on is 1.20"),
        ({"in_turn_tcp": pair(0.07, 0.11)}, "TTFT of document at in_turn_tcp is 1.10"),
        ({"in_turn_on": pair(0.06, tokens=0)}, "in_turn_on: nothing was loaded"),
        ({"in_turn_on": pair(0.06, words="other")}, "of the answers are equal"),
    ],
)
def test_what_is_not_as_it_must_be_is_said(changed, why):
    _, problems = judge(runs(**changed))
    assert len(problems) == 1
    assert why in problems[0]
