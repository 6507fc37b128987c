"""Waiting for what another thread, process or end of a socket does."""

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], object]) -> None:
    """Poll until `holds` gives something true; the test's own time limit is the deadline."""
    while not holds():  # noqa: ASYNC110 - the state has no event
        await asyncio.sleep(0.001)
