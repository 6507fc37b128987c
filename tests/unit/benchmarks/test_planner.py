"""The planner's benchmark: its engines beside the exact simulator, its baselines, and that nothing is lost by scaling."""

import asyncio
import gzip
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from benchmarks.planner.baselines import Autoscaler, Interpolation, Oracle, Static
from benchmarks.planner.case import Case
from benchmarks.planner.comparison import compare
from benchmarks.planner.exact import against_exact
from benchmarks.planner.experiment import play
from benchmarks.planner.planned import Planned
from benchmarks.planner.plot import Row, draw
from benchmarks.planner.strategies import workers_at_mean, workers_at_peak
from benchmarks.planner.timeline import timeline
from benchmarks.planner.workload import Workload, from_trace, steady
from benchmarks.planner.world.fleets import find_model
from benchmarks.planner.world.prefix_cache import PrefixCache
from penstock.core.errors import RequestError
from penstock.core.types.instances import Role

MODEL = find_model("8b", Path(__file__).parents[3] / "examples")


def stepped(low_per_s=5.0, high_per_s=50.0, span_s=240.0) -> Workload:
    """Make a load that steps up for the middle half."""
    load = steady(high_per_s, span_s, seed=3)
    random = np.random.default_rng(3)
    middle = (load.at_s > span_s / 4) & (load.at_s < 3 * span_s / 4)
    kept = middle | (random.random(load.requests) < low_per_s / high_per_s)
    return Workload("stepped", load.at_s[kept], load.input_tokens[kept], load.output_tokens[kept], span_s)


class Mover:
    """Starts, flips and retires workers every few seconds."""

    async def run(self, cluster):
        connector = cluster.connector
        await asyncio.sleep(20)
        await connector.add(Role.PREFILL, 1, by="test")
        await asyncio.sleep(40)
        await connector.flip("prefill-1", Role.DECODE, by="test")
        await asyncio.sleep(20)
        await connector.retire(["decode-1"], by="test")
        await asyncio.sleep(20)
        await connector.flip("prefill-1", Role.PREFILL, by="test")


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


def test_a_prefix_cache_gives_way_to_running_requests():
    cache = PrefixCache()
    cache.use((1, 2, 3))
    cache.use((1, 9))
    cache.shrink(3 * 512)
    assert cache.cached_tokens((1, 9), 5_000) == 1024
    assert cache.cached_tokens((1, 2, 3), 5_000) == 1024
    assert cache.cached_tokens((1, 2), 1024) == 1023
    cache.shrink(-1)
    assert cache.cached_tokens((1,), 5_000) == 0


def test_no_request_is_lost_while_workers_start_flip_and_retire():
    found = run(Mover(), steady(30.0, 150.0, seed=2), {Role.PREFILL: 1, Role.DECODE: 2})
    assert found.failed == 0
    assert found.flips == 2
    assert found.history[-1][2] == {Role.PREFILL: 2, Role.DECODE: 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        Autoscaler({Role.AGGREGATED: 25.0}, stabilised_s=30.0),
        Interpolation((MODEL.capacity(Role.AGGREGATED),), MODEL.slo, 1.3, period_s=15.0),
        Oracle({Role.AGGREGATED: np.array([1, 1, 3, 3, 3, 3, 1, 1])}),
        Planned(MODEL),
    ],
    ids=["autoscaler", "interpolation", "oracle", "planner"],
)
def test_strategies_follow_a_step(strategy):
    found = run(strategy, stepped(), {Role.AGGREGATED: 1})
    counts = [counts[Role.AGGREGATED] for _, _, counts in found.history]
    assert max(counts) >= 3
    assert found.failed == 0


class Flipper:
    """Gives a prefill worker the role decode; what becomes of it is in `refused`."""

    refused = ""

    async def run(self, cluster):
        await asyncio.sleep(5)
        try:
            await cluster.connector.flip("prefill-1", Role.DECODE, by="test")
        except RequestError as error:
            self.refused = error.message


@pytest.mark.parametrize("can_flip", [True, False])
def test_a_case_without_flips_refuses_them(can_flip):
    strategy = Flipper()
    found = play(
        strategy,
        steady(10.0, 60.0, seed=1),
        MODEL.fleet,
        MODEL.slo,
        replicas={Role.PREFILL: 2, Role.DECODE: 1},
        start_s=10.0,
        can_flip=can_flip,
    )
    assert found.flips == can_flip
    assert bool(strategy.refused) != can_flip
    assert found.failed == 0


def test_a_timeline_has_the_worst_minutes_and_the_most_workers():
    at_s = np.arange(0, 12_000, 10.0)
    load = Workload("even", at_s, np.full(1200, 100), np.full(1200, 10), 12_000.0)
    is_good = at_s >= 60
    history = [
        (0.5, 2, {Role.PREFILL: 1, Role.DECODE: 1}),
        (400.0, 3, {Role.PREFILL: 2, Role.DECODE: 1}),
        (500.0, 2, {Role.DECODE: 2}),
    ]
    found = timeline(load, is_good, history)
    assert {len(values) for values in found.values()} == {40}
    assert found["attainment"][:2] == [0.0, 1.0]
    assert found["workers_prefill"][:3] == [1.0, 2.0, 0.0]
    assert found["workers_decode"][:3] == [1.0, 2.0, 2.0]
    assert found["requests_per_s"][0] == 0.1
    assert found["input_tokens_per_s"][0] == 10.0


def test_a_plot_has_a_row_for_each_run():
    series = {
        "requests_per_s": [1.0, 2.0, 2.0, 1.0],
        "input_tokens_per_s": [100.0, 400.0, 400.0, 100.0],
        "attainment": [1.0, 0.5, 1.0, 1.0],
        "workers_prefill": [1.0, 1.0, 3.0, 3.0],
        "workers_decode": [1.0, 1.0, 1.0, 2.0],
    }
    oracle = {"workers_prefill": [1.0, 3.0, 3.0, 1.0], "workers_decode": [1.0, 1.0, 1.0, 1.0]}
    drawn = draw([Row("one <run>", 4.0, series, oracle), Row("other", 4.0, series)])
    ET.fromstring(drawn)
    assert "one &lt;run&gt;" in drawn
    assert drawn.count("<path") == 2 * 2 + 3 + 2 + 2
    assert drawn.count("oracle, all") == 1
    assert draw([]).startswith("<svg")


def made_figures(attainment, gpu_hours):
    names = ("ttft_share", "itl_share", "failed", "flips", "changes_per_hour", "cached_share")
    return dict.fromkeys(names, 0.0) | {"attainment": attainment, "gpu_hours": gpu_hours}


class MadeRunner:
    """Makes figures of jobs up: a strategy holds more with a larger setting, and costs more."""

    def __init__(self):
        self.jobs = []

    def run(self, job):
        return dict(self.run_many([job]))[job]

    def run_many(self, jobs):
        for job in jobs:
            self.jobs.append(job)
            setting = sum(job.setting)
            limit = {"static": 4.0, "oracle": 1.05, "interpolation": 9.0}.get(job.strategy, 0.0)
            yield job, made_figures(0.998 if setting >= limit else 0.5 + setting / 100, setting)


def test_the_cheapest_setting_that_holds_is_found():
    runner = MadeRunner()
    case = Case("made", "steady", "8b", 10.0, 30.0, span_s=600.0)
    found = compare(case, runner, Path(__file__).parents[3] / "examples")
    assert found.settings["static-peak"] == (4.0,)
    (oracle,) = found.settings["oracle"]
    assert 1.05 <= oracle <= 1.1
    assert found.settings["interpolation"] == (3.0,)  # none holds: the one that comes nearest


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

    def test_each_copy_of_a_trace_shares_prefixes_with_itself(self, tmp_path):
        path = tmp_path / "trace.jsonl"
        rows = [
            {"timestamp": 100_000 * n, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 90 + n]}
            for n in range(8)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        load = from_trace(path, "trace", 3.0)
        of = [load.prefix_ids(number) for number in range(load.requests)]
        assert len(of) == 24
        assert {len(ids) for ids in of} == {2}
        assert len(set(of)) == 3
        assert sorted(load.reusable_tokens().tolist()) == [0] * 3 + [1024] * 21

    def test_the_peak_needs_more_workers_than_the_mean(self):
        load = Case("diurnal", "diurnal", "8b", 100.0, 60.0, span_s=3600.0).workload()
        peak, mean = (guess(load, MODEL, [Role.AGGREGATED]) for guess in (workers_at_peak, workers_at_mean))
        assert peak[Role.AGGREGATED] > 1.5 * mean[Role.AGGREGATED]
