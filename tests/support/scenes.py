"""Tests that are scenes: coroutines that get a running deployment, or a part of one."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence

Scene = Callable[..., Awaitable[None]]
Test = Callable[..., None]


def scenes(run: Callable[..., None], parts: int) -> Callable[..., Callable[[Scene], Test]]:
    """Make a decorator of tests.

    Args:
        run: runs a scene; further arguments are those of the decorator.
        parts: number of arguments that `run` gives a scene. pytest gives it those that follow.
    """

    def with_options(*arguments: object, **options: object) -> Callable[[Scene], Test]:
        def decorate(scene: Scene) -> Test:
            fixtures = list(inspect.signature(scene).parameters.values())[parts:]
            return _test(run, scene, fixtures, *arguments, **options)

        return decorate

    return with_options


def run_by(run: Callable[..., None], *arguments: object, **options: object) -> Callable[[Scene], Test]:
    """Make a test of a scene whose positional parameters `run` gives; pytest gives the keyword-only ones."""

    def decorate(scene: Scene) -> Test:
        parameters = inspect.signature(scene).parameters.values()
        fixtures = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
        return _test(run, scene, fixtures, *arguments, **options)

    return decorate


def _test(
    run: Callable[..., None],
    scene: Scene,
    fixtures: Sequence[inspect.Parameter],
    *arguments: object,
    **options: object,
) -> Test:
    """Make the test, which asks pytest for these fixtures alone."""

    @functools.wraps(scene)
    def test(**given: object) -> None:
        run(functools.partial(scene, **given), *arguments, **options)

    test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
    return test
