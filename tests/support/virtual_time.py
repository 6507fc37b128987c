"""Tests written as coroutines, which run in virtual time."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from penstock.sim.loop.loop import run_virtual

P = ParamSpec("P")


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test's coroutine in virtual time: its sleeps take none."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run
