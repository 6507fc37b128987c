"""Running coroutines in plain tests: on a real loop with a time limit, or on one whose time is virtual."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(main: Coroutine[Any, Any, T], *, timeout_s: float = 30.0) -> T:
    """Run a test's coroutine; a test that hangs fails after `timeout_s`.

    Raises:
        TimeoutError: it took longer.
    """

    async def limited() -> T:
        async with asyncio.timeout(timeout_s):
            return await main

    return asyncio.run(limited())


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a `VirtualLoop`: hours of sleeping take no time, and always the same turns.

    Raises:
        RuntimeError: it waits for something that can never come.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer whenever nothing else is to be done. No threads, no sockets."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        self._now_s += seconds


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("the virtual loop is stuck: nothing is ready and no timer is set")
            self._loop.jump(max(0.0, timeout))
        return ready
