"""`python -m benchmarks policies`: what is resumed, what is searched, what the ratios are, and what a workload is."""

import math

import pytest

from benchmarks.policies import summary
from benchmarks.policies.cells import Cell
from benchmarks.policies.comparison import Results, find_saturation
from penstock.core.errors import ConfigError

HEAD = Cell("S", "70b-fp8", 80)
LOW, OVER, SLOW = Cell("S", "8b-bf16", 30), Cell("S", "8b-bf16", 110), Cell("S", "70b-fp8", 80, "slow-worker")
POOR = Cell("M", "8b-bf16", 30)


def results(rows, reusable=None):
    """Give results of rows (cell, policy, mean TTFT of each seed)."""
    made = Results()
    for cell, policy, seconds in rows:
        key = (cell.workload, cell.deployment)
        made.workloads[key] = {"reusable_share": (reusable or {}).get(cell.workload, 0.6)}
        made.saturation_rps[key] = 10.0
        for seed, ttft_s in enumerate(seconds, start=1):
            made.runs[cell, policy, seed] = {
                "ttft_mean_s": ttft_s, "e2e_mean_s": 10 * ttft_s, "failed": 0, "worker_share_min": 0.5,
                "worker_share_max": 1.5,
            }  # fmt: skip
    return made


class TestSummary:
    def figures(self, rows, **options):
        return summary.summarise(results(rows, **options), "kv").figures

    def test_seeds_are_averaged_before_ratios(self):
        rows = [
            (HEAD, "kv", [1.0, 3.0]),
            (HEAD, "round-robin", [4.0, 8.0]),
            (HEAD, "least-loaded", [2.0, 4.0]),
        ]
        found = self.figures(rows)
        assert found["headline_ttft_round-robin_over_kv"] == 3.0
        assert found["headline_e2e_round-robin_over_kv"] == 3.0
        assert found["headline_ttft_least-loaded_over_kv"] == 1.5

    def test_the_best_single_baseline_has_the_lowest_geometric_mean(self):
        rows = [
            (HEAD, "kv", [1.0]), (HEAD, "a", [1.0]), (HEAD, "b", [3.0]),
            (LOW, "kv", [2.0]), (LOW, "a", [9.0]), (LOW, "b", [2.5]),
            (OVER, "kv", [100.0]), (OVER, "a", [1.0]), (OVER, "b", [50.0]),
            (SLOW, "kv", [100.0]), (SLOW, "a", [1.0]), (SLOW, "b", [1.0]),
        ]  # fmt: skip
        told = summary.summarise(results(rows), "kv")
        assert told.best_single == "b"  # sqrt(3 * 2.5) < sqrt(1 * 9), overload and trouble left out
        assert told.figures["ttft_geomean_over_best_single"] == pytest.approx(math.sqrt(1 / 3 * 2 / 2.5))

    def test_cells_without_anything_to_reuse_count_only_against_their_own_best(self):
        rows = [
            (HEAD, "kv", [1.0]), (HEAD, "a", [2.0]),
            (POOR, "kv", [5.0]), (POOR, "a", [4.0]),
        ]  # fmt: skip
        found = self.figures(rows, reusable={"M": 0.07})
        assert found["ttft_geomean_over_best_single"] == 0.5
        assert found["cells_near_best_share"] == 0.5
        assert found["ttft_over_best_of_cell_worst"] == 1.25


@pytest.mark.parametrize(("limit", "message"), [(0.0, "no rate down to 2"), (math.inf, "every rate up to 4")])
def test_a_search_for_saturation_without_end_is_an_error(limit, message):
    with pytest.raises(ConfigError, match=message):
        find_saturation(lambda rate: rate <= limit, 1.0, tolerance=0.03)
