import pytest

from benchmarks.tenants import figures_of
from benchmarks.tenants.load import Flooded


def test_a_half_beside_a_flood_is_compared_with_the_one_alone() -> None:
    alone_s = [0.05] * 98 + [0.1, 0.1]
    beside_s = [0.06] * 98 + [0.15, 0.15]
    assert figures_of(alone_s, alone_s, None) == {
        "ttft_ms_p50": pytest.approx(50),
        "ttft_ms_p99": pytest.approx(100),
    }
    figures = figures_of(beside_s, alone_s, Flooded(answers=300, refusals=20, seconds=10.0))
    assert figures["p50_over_alone"] == pytest.approx(1.2)
    assert figures["p99_over_alone"] == pytest.approx(1.5)
    assert figures["flood_requests_per_s"] == 30
    assert figures["flood_refusals_per_s"] == 2
