"""What kv-fleet makes of its runs, and the link that it slows them with."""

import pytest

from benchmarks.kv.fleet import LONG_PAYS_GB_PER_S, SHORT_PAYS_GB_PER_S, Fleet, judge
from benchmarks.processes.chats import Answer
from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import Dtype, find_hardware
from penstock.perf.model.parallel import Parallel
from penstock.perf.roofline.roofline import Roofline


def fleet(ttft_s, *, words="same", workers=4, block_bytes=40_960, hits=100):
    answers = (Answer(text=words, ttft_s=ttft_s), Answer(text="b", ttft_s=ttft_s))
    return Fleet((answers, answers), block_bytes, hits, hits // 16, workers)


def runs(**changed):
    usual = {
        "none": [fleet(0.1, block_bytes=0, hits=0, workers=0)],
        "0.2_gb_per_s": [fleet(0.1, hits=0, workers=0)],
        "1_gb_per_s": [fleet(0.1)],
        "5_gb_per_s": [fleet(0.06)],
        "1_gb_per_s_long": [fleet(0.07)],
    }
    return usual | {name: [one] for name, one in changed.items()}


def test_a_fleet_that_gains_has_no_problems():
    figures, problems = judge(runs())
    assert problems == []
    assert figures["ttft_ratio_5_gb_per_s"] == pytest.approx(0.6)
    assert figures["equal_answers_share"] == 1


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"1_gb_per_s": fleet(0.12)}, "TTFT with the store at 1_gb_per_s is 1.20"),
        ({"5_gb_per_s": fleet(0.06, workers=3)}, "3 of 4 workers found blocks of others at 5_gb_per_s"),
        ({"1_gb_per_s_long": fleet(0.07, workers=0)}, "0 of 4 workers found blocks of others"),
        ({"5_gb_per_s": fleet(0.06, words="other")}, "of the answers are equal"),
        ({"5_gb_per_s": fleet(0.06, block_bytes=20_480)}, "expected 40960"),
    ],
)
def test_what_is_not_as_it_must_be_is_said(changed, why):
    _, problems = judge(runs(**changed))
    assert len(problems) == 1
    assert why in problems[0]


@pytest.mark.parametrize(
    ("hardware", "tensor", "tokens", "pays"),
    [("h100", 2, 4096, SHORT_PAYS_GB_PER_S), ("h200", 1, 98_304, LONG_PAYS_GB_PER_S)],
)
def test_what_pays_is_the_rooflines(hardware, tensor, tokens, pays):
    shape = find_shape("llama-3.1-70b")
    model = Roofline(shape, find_hardware(hardware), Parallel(tp=tensor), Dtype.FP8, Dtype.FP8)
    bytes_ = tokens * shape.kv_bytes_per_token(Dtype.FP8)
    assert bytes_ / model.prefill_s(tokens) / 1e9 == pytest.approx(pays, rel=0.03)
