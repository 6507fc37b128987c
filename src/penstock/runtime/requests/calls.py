"""Calls from a frontend to one worker that have not been answered yet."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from penstock.core.errors import PenstockError

A = TypeVar("A")


class Calls(Generic[A]):
    """Pending calls by id, all with answers of one type. One event loop owns it; the worker bounds their number."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[A]] = {}

    async def ask(self, send: Callable[[int], None]) -> A:
        """Send a call with a new id, and return its answer. The caller sets a timeout.

        Raises:
            PenstockError: the error passed to `answered` or `fail`.
        """
        call_id = next(self._ids)
        self._waiting[call_id] = future = asyncio.get_running_loop().create_future()
        try:
            send(call_id)
            answer: A = await future
            return answer
        finally:
            del self._waiting[call_id]

    def answered(self, call_id: int, outcome: PenstockError | A) -> None:
        """Resolve a call with its answer or its error; ignored if nothing waits for it any more."""
        future = self._waiting.get(call_id)
        if future is None or future.done():
            return
        if isinstance(outcome, PenstockError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def fail(self, error: PenstockError) -> None:
        """Fail all pending calls: no answers will arrive."""
        for call_id in tuple(self._waiting):
            self.answered(call_id, error)
