"""Questions of one side's transport to the other's, by number, and the answers that are still to come."""

import asyncio
from itertools import count
from typing import Generic, TypeVar

from penstock.core.errors import PenstockError, ProtocolError

A = TypeVar("A")


class Questions(Generic[A]):
    """Those of one channel. Its event loop owns it; whoever asks bounds how many there are."""

    def __init__(self, peer: str) -> None:
        """Ask nothing yet.

        Args:
            peer: whom, for errors.
        """
        self._peer = peer
        self._numbers = count(1)
        self._open: dict[int, asyncio.Future[A]] = {}
        self._error: PenstockError | None = None

    def __len__(self) -> int:
        return len(self._open)

    def number(self) -> int:
        """Give the next question's number."""
        return next(self._numbers)

    def ask(self, number: int) -> "asyncio.Future[A]":
        """Expect an answer to a question that is sent this moment.

        Raises:
            PenstockError: the peer is gone.
        """
        if self._error is not None:
            raise self._error
        self._open[number] = future = asyncio.get_running_loop().create_future()
        return future

    def answered(self, number: int, answer: A) -> None:
        """Take an answer; whoever asked may have given up meanwhile.

        Raises:
            ProtocolError: nobody asked.
        """
        waiting = self._open.pop(number, None)
        if waiting is None:
            raise ProtocolError(f"agent {self._peer}: an answer to question {number}, which nobody asked")
        if not waiting.done():
            waiting.set_result(answer)

    def end(self, error: PenstockError) -> None:
        """The peer is gone: no answer comes any more. The first error counts."""
        self._error = self._error or error
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(self._error)
        self._open.clear()
