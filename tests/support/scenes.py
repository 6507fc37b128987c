"""Tests that are scenes: coroutines that get a running deployment, or a part of one."""

import functools
import inspect
from collections.abc import Awaitable, Callable

Scene = Callable[..., Awaitable[None]]


def scenes(run: Callable[..., None], parts: int) -> Callable[..., Callable[[Scene], Callable[..., None]]]:
    """Make a decorator of tests.

    Args:
        run: runs a scene; further arguments are those of the decorator.
        parts: number of arguments that `run` gives a scene. pytest gives it those that follow.
    """

    def with_options(*arguments: object, **options: object) -> Callable[[Scene], Callable[..., None]]:
        def decorate(scene: Scene) -> Callable[..., None]:
            signature = inspect.signature(scene)

            @functools.wraps(scene)
            def test(**given: object) -> None:
                run(functools.partial(scene, **given), *arguments, **options)

            del test.__wrapped__
            fixtures = list(signature.parameters.values())[parts:]
            test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
            return test

        return decorate

    return with_options
