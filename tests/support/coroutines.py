"""Tests that are coroutines: each runs on an event loop of its own, or in a scene that a fixture makes."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from penstock.sim.loop.loop import run_virtual
from penstock.testing.loop import run_async

P = ParamSpec("P")
Test = Callable[P, Coroutine[Any, Any, None]]


def virtual(test: Test[P]) -> Callable[P, None]:
    """Run a test on virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **named: P.kwargs) -> None:
        run_virtual(test(*args, **named))

    return run


def real(test: Test[P]) -> Callable[P, None]:
    """Run a test on real time, for four minutes at most."""

    @functools.wraps(test)
    def run(*args: P.args, **named: P.kwargs) -> None:
        run_async(test(*args, **named), timeout_s=240.0)

    return run


def given_by(fixture: str, **options: Any) -> Callable[[Test[...]], Callable[..., None]]:
    """Run a test in a scene, which becomes its first argument.

    Args:
        fixture: gives a function that makes the scene, and runs a coroutine function on it.
        options: of that function.
    """

    def decorate(test: Test[...]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**named: Any) -> None:
            make = named.pop(fixture)
            make(lambda scene: test(scene, **named), **options)

        _, *others = inspect.signature(test).parameters.values()
        asked = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
        others = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in others]
        run.__signature__ = inspect.Signature([asked, *others])  # type: ignore[attr-defined]
        return run

    return decorate
