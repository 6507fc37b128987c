"""Several answers to one prompt: it is computed once, and who answers it again goes where it was."""

from typing import Protocol, Self

from penstock.core.ids import WorkerId


class _Waiting(Protocol):
    def wake(self) -> None: ...


class Siblings:
    """The open requests of one prompt. One event loop owns it.

    The first that is to be sent computes the prompt, where the policy has it; the others wait for its first token, and
    follow it then: their prompts are in that worker's cache. Each goes on alone afterwards. Where the first one ends or
    its worker is lost, the next one is the first.
    """

    def __init__(self) -> None:
        """Have none yet."""
        self._members: list[_Waiting] = []
        self._first: _Waiting | None = None
        self._place: WorkerId | None = None  # where the prompt is computed, once it is

    def joined(self, request: _Waiting) -> Self:
        """Take in one more."""
        self._members.append(request)
        return self

    def leave(self, request: _Waiting) -> None:
        """Let one go that has ended, in whatever way. Safe twice."""
        if request in self._members:
            self._members.remove(request)
            if self._first is request and self._place is None:
                self.lost()

    def must_wait(self, request: _Waiting) -> bool:
        """Say whether another one computes the prompt now; if nobody does, this one is to, or it is computed."""
        if len(self._members) < 2:
            return False
        if self._first is None:
            self._first = request
        return self._first is not request and self._place is None

    def place(self, request: _Waiting) -> WorkerId | None:
        """Name the worker to follow to; None for the first one."""
        return None if self._first is request else self._place

    def computed(self, request: _Waiting, worker_id: WorkerId) -> None:
        """Take note that one has a token from the worker that answers it."""
        if self._first is request and self._place is None:
            self._place = worker_id
            self._wake()

    def lost(self) -> None:
        """Follow nobody any more: a worker that had some of them is lost."""
        self._first = self._place = None
        self._wake()

    def _wake(self) -> None:
        for member in self._members:
            member.wake()
