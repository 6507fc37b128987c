"""What a frontend has asked one worker for over a connection, and not heard the end of."""

import asyncio
from collections.abc import Callable
from itertools import count

from penstock.core.errors import PenstockError


class Calls:
    """Questions by number. Who asks too often is refused by the worker; one event loop owns it."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def ask(self, send: Callable[[int], None]) -> None:
        """Send a question, told its number, and wait for the answer. The caller bounds the time.

        Raises:
            PenstockError: what `answered` or `fail` was told.
        """
        call_id = next(self._ids)
        self._waiting[call_id] = future = asyncio.get_running_loop().create_future()
        try:
            send(call_id)
            await future
        finally:
            del self._waiting[call_id]

    def answered(self, call_id: int, error: PenstockError | None) -> None:
        """Hear that it is done, or why not; nobody may be waiting for it any more."""
        future = self._waiting.get(call_id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def fail(self, error: PenstockError) -> None:
        """End all with this error: no answer will come."""
        for call_id in tuple(self._waiting):
            self.answered(call_id, error)
