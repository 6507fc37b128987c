"""Runs coroutines in plain tests, with a time limit; `penstock.sim.loop` runs them on virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(
    main: Coroutine[Any, Any, T],
    *,
    timeout_s: float = 120.0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> T:
    """Run a test's coroutine; a test that hangs fails after `timeout_s`.

    Raises:
        TimeoutError: it took longer.
    """

    async def limited() -> T:
        async with asyncio.timeout(timeout_s):
            return await main

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(limited())
