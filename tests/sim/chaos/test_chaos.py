"""Seeded faults on a whole deployment: whatever happens, streams are right, and afterwards nothing is left."""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import structlog

from penstock.sim.chaos import Chaos, Fault, FaultKind
from penstock.sim.chaos_trial import Trial, run_trial, small_spec
from penstock.sim.cluster import SimCluster
from penstock.sim.loop import run
from tests.support.chaos import seeds

HERE = Path(__file__).parent
FAILED_SEEDS = json.loads((HERE / "failed_seeds.json").read_text())
"""Every seed that ever failed stays there, by what it was a trial of."""


EXACT = pytest.mark.parametrize(
    "exact", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["step by step", "jumping"]
)


@pytest.fixture(autouse=True)
def _quiet():
    """Leave the tracebacks of failing steps out: formatting them takes longer than the trials."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.mark.parametrize("seed", [*seeds(10, 36), *FAILED_SEEDS["usual"]])
def test_streams_survive_and_nothing_is_left(seed):
    result = run_trial(seed)
    assert result.outcomes.total() == Trial().clients
    assert result.direct_tokens > 50, "many go the way of a frontend's clients"


@pytest.mark.parametrize("seed", seeds(4, 12))
@pytest.mark.parametrize(
    "trial",
    [
        Trial(exact=False),
        Trial(kv_events=False),
        Trial(clients=120, duration_s=2.0, hold_s=0.005),
        Trial(jitter_s=0.2),
    ],
    ids=["engines jump", "workers send no events", "routers hold requests", "steps arrive together"],
)
def test_streams_survive_in_other_deployments(seed, trial):
    assert run_trial(seed, trial).outcomes.total() == trial.clients


def test_streams_survive_steps_that_fail():
    """None of them ends with the step's error, however many were in it."""
    trial = Trial(faults=4, failed_steps=20)
    outcomes: Counter[str] = Counter()
    migrations = 0
    for seed in range(3):
        result = run_trial(seed, trial)
        assert result.outcomes.total() == trial.clients
        outcomes += result.outcomes
        migrations += result.migrations
    assert migrations > 30
    assert not outcomes["engine_error"]
    assert outcomes["unavailable"] + outcomes["overloaded"] < outcomes.total() / 20


@EXACT
def test_streams_survive_where_hosts_hold_what_devices_gave_up(exact):
    trial = Trial(clients=60, host_blocks=64, exact=exact)
    onboarded = 0
    for seed in (*range(4), *FAILED_SEEDS["hosted"]):
        result = run_trial(seed, trial)
        assert result.outcomes.total() == trial.clients
        onboarded += result.onboarded_tokens
    assert onboarded > 50


@EXACT
def test_streams_survive_where_prompts_are_transferred(exact):
    """Prefill and decode workers die, stop and are cut off alike."""
    transfers = moved_bytes = 0
    for seed in range(4):
        result = run_trial(seed, Trial(prefill_workers=2, exact=exact))
        assert result.outcomes.total() == Trial().clients
        transfers += result.kv_transfers
        moved_bytes += result.moved_bytes
    assert transfers > 40
    assert moved_bytes > 4e6


def test_faults_of_every_kind_happen_and_few_requests_fail():
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    migrations = 0
    for seed in range(1000, 1006):
        result = run_trial(seed, Trial(faults=16))
        outcomes += result.outcomes
        migrations += result.migrations
        kinds.update(fault.kind for fault in result.faults)
    assert set(kinds) == set(FaultKind)
    assert migrations >= 15
    assert outcomes["length"] > outcomes.total() / 3
    assert outcomes["unavailable"] + outcomes["engine_error"] + outcomes["overloaded"] < outcomes.total() / 20


def test_a_plan_happens_as_written():
    """Each fault at its moment and to its worker, for as long as it says."""
    plan = [
        Fault(at_s=1.0, kind=FaultKind.SLOW, worker=1, duration_s=2.0),
        Fault(at_s=2.0, kind=FaultKind.KILL, worker=0),
    ]

    async def main(rng):
        loop = asyncio.get_running_loop()
        async with SimCluster(small_spec(), rng) as cluster:
            for number in range(3):
                await cluster.start(f"worker-{number}")
            chaos, start_s = Chaos(cluster), loop.time()
            usual = cluster.workers["worker-1"].pace.factor
            async with asyncio.TaskGroup() as group:
                group.create_task(chaos.run(plan))
                await asyncio.sleep(1.5)
                assert cluster.workers["worker-1"].pace.factor == 5 * usual
                assert set(cluster.workers) == {"worker-0", "worker-1", "worker-2"}
                await asyncio.sleep(1.0)
                assert set(cluster.workers) == {"worker-1", "worker-2", "replacement-1"}
            assert loop.time() == pytest.approx(start_s + 3.0, abs=0.1)
            assert cluster.workers["worker-1"].pace.factor == usual
            assert chaos.done == plan

    run(main, 0)


_TWO = """
import logging, structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
from penstock.sim.chaos_trial import Trial, run_trial
print(run_trial(11), run_trial(12), run_trial(13, Trial(prefill_workers=2)))
"""


def test_the_same_seed_is_the_same_run_in_every_process():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", _TWO],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1


def test_without_faults_every_request_ends_as_asked():
    result = run_trial(3, Trial(faults=0))
    assert not result.faults
    assert result.migrations == 0
    assert set(result.outcomes) <= {"length", "left", "deadline_exceeded"}
