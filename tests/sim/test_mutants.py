"""Each planted bug of `mutants.py` is caught by the same trials that the chaos suite runs."""

import importlib.util
from pathlib import Path

import pytest

from penstock.sim.loop import Deadlock
from penstock.sim.trial import run_trial

SEEDS = range(8)


def _load_mutants():
    spec = importlib.util.spec_from_file_location("penstock_mutants", Path(__file__).parent / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MUTANTS


MUTANTS = _load_mutants()


def caught_by(plant) -> int | None:
    """Give the first seed whose trial fails."""
    for seed in SEEDS:
        try:
            with plant():
                run_trial(seed)
        except (AssertionError, Deadlock):
            return seed
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name):
    assert caught_by(MUTANTS[name]) is not None, f"{name} went through {len(SEEDS)} trials"


def test_without_a_bug_the_same_trials_pass():
    for seed in SEEDS:
        run_trial(seed)
