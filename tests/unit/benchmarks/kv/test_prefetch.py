"""What kv-prefetch makes of its runs."""

import pytest

from benchmarks.kv.prefetch import PREFETCH, TIERS, judge


def test_parts_of_a_trace_are_compared_one_by_one():
    samples = {
        f"{metric} {tier} {mode}": [1.0, 4.0]
        for metric in ("ttft_mean_s", "ttft_p90_s", "reusing_ttft_mean_s")
        for tier in TIERS
        for mode in PREFETCH
    }
    samples["ttft_mean_s object with"] = [0.5, 4.4]
    figures = judge(samples)
    assert figures["ttft_mean_s object with"] == pytest.approx(2.45)
    assert figures["ttft_mean_s object change"] == pytest.approx(-0.02)
    assert figures["ttft_mean_s object change_least"] == pytest.approx(-0.5)
    assert figures["ttft_mean_s object change_most"] == pytest.approx(0.1)
    assert figures["ttft_mean_s disk change"] == 0
