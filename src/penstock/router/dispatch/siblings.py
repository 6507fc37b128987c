"""Several answers to one prompt (`n` > 1): the prompt is computed once, and the others follow to that worker."""

from typing import Protocol, Self

from penstock.core.ids import WorkerId


class _Waiting(Protocol):
    def wake(self) -> None: ...


class Siblings:
    """The open requests of one prompt. One event loop owns it.

    The first request is routed by the policy. The others wait for its first token and go to its worker, whose cache has the
    prompt. Afterwards each goes on alone. Where the first ends early or its worker is lost, the next becomes the first.
    """

    def __init__(self) -> None:
        """Have none yet."""
        self._members: list[_Waiting] = []
        self._first: _Waiting | None = None
        self._place: WorkerId | None = None  # where the prompt is computed, once it is
        self._answers: WorkerId | None = None  # of the latest first token

    def joined(self, request: _Waiting) -> Self:
        """Add a request."""
        self._members.append(request)
        return self

    def beside(self, request: _Waiting) -> "Siblings":
        """Give the group of one that is opened beside a request: this group, or if that has ended one that goes to its worker."""
        if request in self._members:
            return self
        group = Siblings()
        group._place = self._answers
        return group

    def leave(self, request: _Waiting) -> None:
        """Remove a request that has ended. Safe twice."""
        if request in self._members:
            self._members.remove(request)
            if self._first is request and self._place is None:
                self.lost()

    def must_wait(self, request: _Waiting) -> bool:
        """Say whether this request waits for another that computes the prompt; if none does, this one becomes the first."""
        if len(self._members) < 2:
            return False
        if self._first is None:
            self._first = request
        return self._first is not request and self._place is None

    def place(self, request: _Waiting) -> WorkerId | None:
        """Give the worker to follow; None for the first request, and until the prompt is computed."""
        return None if self._first is request else self._place

    def computed(self, request: _Waiting, worker_id: WorkerId) -> None:
        """Note the first token of a request, and the worker that answers it."""
        self._answers = worker_id
        if self._first is request and self._place is None:
            self._place = worker_id
            self._wake()

    def lost(self) -> None:
        """Follow no worker any more: a worker of these requests is lost."""
        self._first = self._place = None
        self._wake()

    def _wake(self) -> None:
        for member in self._members:
            member.wake()
