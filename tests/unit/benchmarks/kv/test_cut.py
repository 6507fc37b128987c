"""Always loading from a slow store costs time, and the cut never does."""

import argparse

from benchmarks.kv import cut


def run(**options):
    given = {"trace": None, "blocks": 300, "quick": True} | options
    return cut.run(argparse.Namespace(**given))


def test_a_slow_store_costs_time_without_the_cut_alone():
    report = run()
    over = {
        (mode, speed): report.figures[f"prefill_over_none_{mode}_{speed:g}_gb_per_s"]
        for mode in ("always", "cut")
        for speed in cut.SPEEDS_GB_PER_S
    }
    assert over["always", 0.2] > 1.5
    assert over["always", 20.0] < 0.9
    for speed in cut.SPEEDS_GB_PER_S:
        assert over["cut", speed] <= min(over["always", speed], 1) + 1e-9
    assert report.problems == []
