"""Tests that are coroutine functions in a scene that a fixture makes."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

Test = Callable[..., Coroutine[Any, Any, None]]


def given_by(fixture: str, **options: Any) -> Callable[[Test], Callable[..., None]]:
    """Run a test in a scene, which becomes its first argument.

    Args:
        fixture: gives a function that makes the scene, and runs a coroutine function on it.
        options: of that function.
    """

    def decorate(test: Test) -> Callable[..., None]:
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
