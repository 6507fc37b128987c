"""Trials of chaos on virtual time."""

import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.sim.loop.loop import run


def run_trial(main: Callable[[random.Random], Coroutine[Any, Any, Counter[str]]], seed: int) -> Counter[str]:
    """Run a trial; of a group of errors the first is raised, from the group."""
    try:
        return run(main, seed)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
