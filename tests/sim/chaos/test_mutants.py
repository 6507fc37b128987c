"""Each planted bug of `mutants.py` is caught by the same trials that the chaos suite runs."""

import logging

import pytest
import structlog

from penstock.sim.chaos_trial import Trial, run_trial
from tests.sim.chaos.mutants import CROWDED, DIRECT, HOLDING, MUTANTS, STEPS_FAIL, TIERED

SEEDS = range(8)
HELD = Trial(clients=120, duration_s=2.0, hold_s=0.005)
HOSTED = Trial(clients=60, host_blocks=64)
FAILING = Trial(faults=4, failed_steps=60)
BUNCHED = Trial(jitter_s=0.2)
SPECIAL = (
    dict.fromkeys(HOLDING | CROWDED, HELD)
    | dict.fromkeys(TIERED, HOSTED)
    | dict.fromkeys(STEPS_FAIL, FAILING)
    | dict.fromkeys(DIRECT, BUNCHED)
)


@pytest.fixture(autouse=True)
def _quiet():
    """Leave the tracebacks of failing steps out: formatting them takes longer than the trials."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name):
    trial = SPECIAL.get(name, Trial())
    caught = MUTANTS.caught_by(name, lambda seed: run_trial(seed, trial), SEEDS)
    assert caught is not None, f"{name} went through {len(SEEDS)} trials"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "trial",
    [Trial(), HELD, HOSTED, FAILING, BUNCHED],
    ids=["usual", "held", "hosted", "failing", "bunched"],
)
def test_without_a_bug_the_same_trials_pass(trial):
    for seed in SEEDS:
        run_trial(seed, trial)
