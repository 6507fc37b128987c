"""Tests that are coroutine functions, each run as its decorator says."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from penstock.sim.loop.loop import run_virtual
from penstock.testing.loop import run_async

Test = Callable[..., None]


def run_by(run: Callable[..., None], *arguments: Any, **options: Any) -> Callable[[Callable[..., Any]], Test]:
    """Make a test of a scene, which `run` gets with these arguments and options.

    `run` gives the scene its positional parameters. The keyword-only ones are parameters and fixtures of the test.
    """

    def decorate(scene: Callable[..., Awaitable[None]]) -> Test:
        def test(**given: Any) -> None:
            run(functools.partial(scene, **given), *arguments, **options)

        parameters = inspect.signature(scene).parameters.values()
        return _named(test, scene, [each for each in parameters if each.kind is each.KEYWORD_ONLY])

    return decorate


def in_loop(main: Callable[..., Coroutine[Any, Any, Any]]) -> Test:
    """Make a test of a coroutine function that runs in a loop of its own, on the wall's time."""

    def test(**given: Any) -> None:
        run_async(main(**given))

    return _named(test, main, list(inspect.signature(main).parameters.values()))


def in_virtual_time(main: Callable[..., Coroutine[Any, Any, Any]]) -> Test:
    """Make a test of a coroutine function that runs on virtual time."""

    def test(**given: Any) -> None:
        run_virtual(main(**given))

    return _named(test, main, list(inspect.signature(main).parameters.values()))


def _named(test: Test, scene: Callable[..., Any], parameters: list[inspect.Parameter]) -> Test:
    """Show pytest the name, the place and the marks of the scene, and what it asks of pytest alone."""
    functools.update_wrapper(test, scene)
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return test
