"""Calls from a frontend to one worker that have not been answered yet."""

import asyncio
from collections.abc import Callable
from itertools import count

from penstock.core.errors import PenstockError


class Calls:
    """Pending calls by id. One event loop owns it; the worker bounds their number."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def ask(self, send: Callable[[int], None]) -> None:
        """Send a call with a new id, and wait for its answer. The caller sets a timeout.

        Raises:
            PenstockError: the error passed to `answered` or `fail`.
        """
        call_id = next(self._ids)
        self._waiting[call_id] = future = asyncio.get_running_loop().create_future()
        try:
            send(call_id)
            await future
        finally:
            del self._waiting[call_id]

    def answered(self, call_id: int, error: PenstockError | None) -> None:
        """Resolve a call: None for success, else its error; ignored if nothing waits for it any more."""
        future = self._waiting.get(call_id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def fail(self, error: PenstockError) -> None:
        """Fail all pending calls: no answers will arrive."""
        for call_id in tuple(self._waiting):
            self.answered(call_id, error)
