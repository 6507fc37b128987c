"""The planner's benchmark: its engines beside the exact simulator, its baselines, and that nothing is lost by scaling."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner.baselines import Static
from benchmarks.planner.case import Case
from benchmarks.planner.exact import against_exact
from benchmarks.planner.experiment import play
from benchmarks.planner.strategies import workers_at_mean, workers_at_peak
from benchmarks.planner.workload import Workload, from_trace, steady
from benchmarks.planner.world.fleets import find_model
from penstock.core.types.instances import Role

MODEL = find_model("8b", Path(__file__).parents[3] / "examples")


def run(strategy, load, replicas, start_s=10.0):
    return play(strategy, load, MODEL.fleet, MODEL.slo, replicas=replicas, start_s=start_s)


def longer(load: Workload, factor: float) -> Workload:
    return replace(load, input_tokens=np.minimum(load.input_tokens * factor, 32_000).astype(int))


def conversations(count: int, turns: int) -> Workload:
    """Make conversations whose every turn has the one before as its prefix, a turn each ten seconds."""
    turn, number = (grid.ravel() for grid in np.meshgrid(np.arange(turns), np.arange(count), indexing="ij"))
    blocks = 2 + 2 * turn
    ids = [np.arange(each) + 1000 * of for each, of in zip(blocks, number, strict=True)]
    return Workload(
        "conversations",
        10.0 * turn + 10.0 * number / count,
        512 * blocks + 100,
        np.full(len(turn), 60),
        10.0 * turns,
        np.concatenate(ids),
        np.cumsum(blocks),
    )


@pytest.mark.parametrize(
    ("load", "replicas"),
    [
        (steady(10.0, 40.0, seed=1), {Role.AGGREGATED: 1}),
        pytest.param(steady(44.0, 40.0, seed=1), {Role.AGGREGATED: 2}, marks=pytest.mark.slow),
        pytest.param(longer(steady(8.0, 40.0, seed=1), 6.0), {Role.AGGREGATED: 2}, marks=pytest.mark.slow),
        pytest.param(steady(30.0, 30.0, seed=1), {Role.PREFILL: 1, Role.DECODE: 2}, marks=pytest.mark.slow),
        pytest.param(
            longer(steady(9.0, 30.0, seed=1), 6.0), {Role.PREFILL: 2, Role.DECODE: 1}, marks=pytest.mark.slow
        ),
        pytest.param(conversations(30, 6), {Role.AGGREGATED: 2}, marks=pytest.mark.slow),
    ],
    ids=["one", "two", "long prompts", "disaggregated", "disaggregated, long prompts", "prefixes"],
)
def test_engines_are_as_fast_as_the_exact_simulators(load, replicas):
    found = against_exact(load, MODEL, replicas)
    for name in ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s"):
        assert found[f"fast_{name}"] == pytest.approx(found[f"exact_{name}"], rel=0.15), name
    assert found["fast_attainment"] == pytest.approx(found["exact_attainment"], abs=0.015)
    assert found["fast_cached_share"] == pytest.approx(found["exact_cached_share"], abs=0.03)


def test_prefixes_are_cached_where_they_were_computed():
    load = conversations(30, 6)
    found = run(Static(), load, {Role.AGGREGATED: 2})
    assert found.cached_share == pytest.approx(
        load.reusable_tokens().sum() / load.input_tokens.sum(), rel=0.02
    )
    assert found.cached_share > 0.6


class TestWorkload:
    def test_copies_of_a_trace_keep_its_rate_over_time(self, tmp_path):
        path = tmp_path / "trace.csv.gz"
        rows = [f"2023-11-16 18:{at // 60:02}:{at % 60:02}.0,100,10" for at in range(0, 900, 3)]
        path.write_bytes(
            gzip.compress("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]).encode())
        )
        load = from_trace(path, "trace", 4.5)
        counts = np.histogram(load.at_s, bins=3)[0]
        assert load.requests == pytest.approx(4.5 * 300, rel=0.1)
        assert counts.max() < 1.2 * counts.min()
        assert (np.diff(load.at_s) >= 0).all()

    def test_the_peak_needs_more_workers_than_the_mean(self):
        load = Case("diurnal", "diurnal", "8b", 100.0, 60.0, span_s=3600.0).workload()
        peak, mean = (guess(load, MODEL, [Role.AGGREGATED]) for guess in (workers_at_peak, workers_at_mean))
        assert peak[Role.AGGREGATED] > 1.5 * mean[Role.AGGREGATED]
