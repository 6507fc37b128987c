"""Each planted bug of `mutants.py` is caught by the same trials that the chaos suite runs."""

import importlib.util
import logging
from pathlib import Path

import pytest
import structlog

from penstock.sim.chaos.trial import Trial, run_trial
from penstock.sim.loop.loop import Deadlock

SEEDS = range(8)


def _load_mutants():
    spec = importlib.util.spec_from_file_location("penstock_mutants", Path(__file__).parent / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_PLANTED = _load_mutants()
MUTANTS = _PLANTED.MUTANTS
HELD = Trial(clients=120, duration_s=2.0, hold_s=0.005)
HOSTED = Trial(clients=60, host_blocks=64)
FAILING = Trial(faults=4, failed_steps=60)
SPECIAL = (
    dict.fromkeys(_PLANTED.HOLDING | _PLANTED.CROWDED, HELD)
    | dict.fromkeys(_PLANTED.TIERED, HOSTED)
    | dict.fromkeys(_PLANTED.FAILING, FAILING)
)


@pytest.fixture(autouse=True)
def _quiet():
    """Leave the tracebacks of failing steps out: formatting them takes longer than the trials."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def caught_by(plant, trial: Trial) -> int | None:
    """Give the first seed whose trial fails."""
    for seed in SEEDS:
        try:
            with plant():
                run_trial(seed, trial)
        except (AssertionError, Deadlock):
            return seed
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name):
    assert caught_by(MUTANTS[name], SPECIAL.get(name, Trial())) is not None, (
        f"{name} went through {len(SEEDS)} trials"
    )


@pytest.mark.parametrize(
    "trial", [Trial(), HELD, HOSTED, FAILING], ids=["usual", "held", "hosted", "failing"]
)
def test_without_a_bug_the_same_trials_pass(trial):
    for seed in SEEDS:
        run_trial(seed, trial)
