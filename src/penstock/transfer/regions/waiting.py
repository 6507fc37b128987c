"""Waiting that a cancellation does not cut short."""

import asyncio
from typing import Any


async def settled(future: "asyncio.Future[Any]") -> None:
    """Wait until a future is done, ignoring its result. A cancellation is raised only after that.

    Use it for work that ends soon, such as a thread that uses memory and was told to stop.
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
