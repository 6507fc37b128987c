"""`python -m benchmarks routers`: what it runs, and what it makes of the results."""

import argparse
from pathlib import Path

import pytest

from benchmarks.simulated import routers

EXAMPLES = Path(__file__).parents[4] / "examples"


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    routers.add_arguments(parser)
    return parser.parse_args(["--examples", str(EXAMPLES), *arguments])


def test_every_cell_is_run_with_one_router_and_with_several():
    runs = dict(routers._runs(parse("--seeds", "2", "--routers", "3", "--requests", "70")))
    assert len(runs) == 2 * 3 * 2 * 2  # deployments, loads, seeds, one router and three
    run = runs["S/8b-bf16/80", 3, 2]
    assert (run.rate_per_s, run.seed) == (pytest.approx(0.8 * 31.3), 2)
    assert (run.workload.requests, run.workload.trace) == (70, None)
    with_trace = dict(routers._runs(parse("--trace", "t.jsonl")))
    assert with_trace["M/70b-fp8/95", 1, 1].workload.trace == Path("t.jsonl")
    assert len(dict(routers._runs(parse("--quick")))) == 2


def test_ratios_are_of_means_over_the_seeds_and_a_high_one_is_a_problem():
    found = {
        f"{cell} {metric}": {1: [1.0, 3.0], 4: [factor, 3 * factor]}
        for metric in ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s")
        for cell, factor in (("S/a/60", 1.0), ("S/a/95", 1.21))
    }
    report = routers._report(found, parse())
    assert report.figures["routers_ttft_p99_ratio_worst"] == pytest.approx(1.21)
    assert report.figures["routers_ttft_mean_ratio_geomean"] == pytest.approx(1.1)
    assert report.figures["S/a/60 ttft_p99_ratio"] == pytest.approx(1.0)
    assert report.samples["S/a/95 routers=4 ttft_p99_s"] == [1.21, 3.63]
    (problem,) = report.problems
    assert problem == "S/a/95: the p99 TTFT of 4 routers is 1.21 times one's, more than 1.15"
    assert not routers._report(found, parse("--quick")).problems
