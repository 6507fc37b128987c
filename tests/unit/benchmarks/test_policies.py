"""`python -m benchmarks policies`: what is resumed, what is searched, what the ratios are, and what a workload is."""

import math
from dataclasses import replace
from types import MappingProxyType

import pytest

from benchmarks.policies import summary
from benchmarks.policies.cells import Cell, Effort
from benchmarks.policies.comparison import Comparison, Results, find_saturation
from benchmarks.runner import DEPLOYMENTS, Cache, Description, find_graph
from penstock.core.errors import ConfigError, PenstockError

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


class NotingRunner:
    """Computes nothing: each policy serves up to a rate of its own, and its mean TTFT is the rate."""

    LIMITS = MappingProxyType({"kv": 8.0, "good": 10.0, "bad": 5.0})

    def __init__(self, cache, fail_after):
        self.cache, self.fail_after, self.noted = cache, fail_after, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def knows(self, job):
        return self.cache.get(job.key) is not None

    def run(self, job):
        return dict(self.run_many([job]))[job]

    def run_many(self, jobs):
        for job in jobs:
            if not self.knows(job):
                if len(self.noted) >= self.fail_after:
                    raise PenstockError("interrupted")
                self.noted.append(job)
                self.cache.put(job.key, self.answer(job))
            yield job, self.cache.get(job.key)

    def answer(self, job):
        if isinstance(job, Description):
            return {"reusable_share": 0.6, "guess_rps": 3.0}
        return {
            "served_share": min(self.LIMITS[job.policy] / job.rate_per_s, 1.0),
            "ttft_mean_s": job.rate_per_s,
        }


class TestComparison:
    """Which runs a comparison asks for, with a runner that only notes them."""

    EFFORT = Effort(requests=50, headline_requests=60, seeds=2, headline_seeds=3, tolerance=0.1)

    @pytest.fixture
    def compare(self, tmp_path):
        for name in DEPLOYMENTS:
            files = find_graph(tmp_path, name)
            for path in (files.graph, files.profile):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(path.name)

        def compare(chosen, policies=("kv", "good", "bad"), fail_after=math.inf, state="state.jsonl"):
            runner = NotingRunner(Cache(tmp_path / state), fail_after)
            found = Comparison(tmp_path, None, {name: name for name in policies}, self.EFFORT, runner).run(
                chosen
            )
            return found, runner.noted

        return compare

    def test_saturation_is_the_best_policys_and_cells_are_parts_of_it(self, compare):
        found, _ = compare([LOW, HEAD])
        for key in (("S", "8b-bf16"), ("S", "70b-fp8")):
            assert 10.0 / 0.98 / 1.1 <= found.saturation_rps[key] <= 10.0 / 0.98
        rate = found.saturation_rps["S", "8b-bf16"]
        assert found.runs[LOW, "bad", 1]["ttft_mean_s"] == pytest.approx(0.3 * rate)
        assert len(found.runs) == 3 * (2 + 3)  # the headline cell has its own number of seeds

    def test_a_saturation_that_is_given_is_not_searched(self, compare, monkeypatch):
        monkeypatch.setattr(self, "EFFORT", replace(self.EFFORT, saturation_rps={"S/8b-bf16": 4.0}))
        found, runs = compare([LOW])
        assert found.saturation_rps == {("S", "8b-bf16"): 4.0}
        assert found.runs[LOW, "bad", 1]["ttft_mean_s"] == pytest.approx(1.2)
        assert len(runs) == 1 + 3 * 2

    @pytest.mark.parametrize("after", [0, 1, 5, 14])
    def test_after_an_interruption_only_the_rest_is_run(self, compare, after):
        """Of the search as well as of the cells."""
        whole, runs = compare([LOW], state="whole.jsonl")
        with pytest.raises(PenstockError, match="interrupted"):
            compare([LOW], fail_after=after)
        found, rest = compare([LOW])
        assert len(rest) == len(runs) - after
        assert found == whole
