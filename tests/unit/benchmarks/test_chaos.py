"""Reports of parts of a run under faults are counted as one run."""

import json

import pytest

from benchmarks.chaos.parts import add_up
from penstock.core.errors import ConfigError


def part(folder, seed, *, lost=0, commit="abc", concurrency=32):
    figures = {
        "completed": 100 - lost, "excused": 1, "lost": lost, "wrong": 0, "repeated": 0, "faults": 3, "s": 50.0,
        "latency_p50_s": 0.1 * seed, "latency_max_s": 1.0 * seed,
    }  # fmt: skip
    config = {"requests": 100, "seed": seed, "faults": {"worker_killed": 3}, "concurrency": concurrency}
    path = folder / f"{seed}.json"
    report = {"name": "chaos", "commit": commit, "machine": {"cores": 2}, "config": config}
    path.write_text(
        json.dumps(report | {"figures": {f"chaos_{name}": value for name, value in figures.items()}})
    )
    return path


def test_counts_are_sums_and_each_part_is_shown(tmp_path):
    report = add_up([part(tmp_path, 1), part(tmp_path, 2, lost=1)], {"planes_cpu_over_local": 1.05}, {})
    assert report.figures["chaos_completed"] == 199
    assert report.figures["chaos_lost"] == 1
    assert report.figures["chaos_faults"] == 6
    assert report.figures["chaos_requests_per_s"] == pytest.approx(1.99)
    assert report.figures["chaos_latency_max_s"] == 2.0
    assert report.figures["planes_cpu_over_local"] == 1.05
    assert report.samples["parts_lost"] == [0, 1]
    assert report.config["seeds"] == [1, 2]
    assert report.config["requests"] == 200
    assert report.config["commit_of_parts"] == "abc"


@pytest.mark.parametrize(
    ("other", "said"), [({"commit": "def"}, "commit differs"), ({"concurrency": 8}, "config differs")]
)
def test_parts_of_different_runs_are_refused(tmp_path, other, said):
    with pytest.raises(ConfigError, match=said):
        add_up([part(tmp_path, 1), part(tmp_path, 2, **other)], {}, {})
