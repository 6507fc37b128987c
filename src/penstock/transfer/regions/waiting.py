"""Waiting for what has to end before anybody may go on."""

import asyncio
from typing import Any


async def settled(future: "asyncio.Future[Any]") -> None:
    """Wait until a future is done, whatever it gives. Cancelled, once or more, it waits all the same and then gives way.

    For what is known to end soon: a thread that still uses memory, and was told to stop.
    """
    cancellation: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancellation = error
    if not future.cancelled():
        future.exception()  # it was seen
    if cancellation is not None:
        raise cancellation
