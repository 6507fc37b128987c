"""The requests that wait for the batch, in order of turn: as they came, or the shortest first."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from penstock.core.ids import RequestId
from penstock.core.types.requests import Request
from penstock.engine.scheduling.shortest_first_queue import Ranked, ShortestFirstQueue


class Waiting(Ranked, Protocol):
    """A request as the queue sees it; `known` counts the tokens that it has."""

    request: Request

    @property
    def known(self) -> int: ...


S = TypeVar("S", bound=Waiting)


class WaitingQueue(Generic[S]):
    """A queue that anyone can leave; one that is preempted comes back at its front. A scheduler bounds it."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens that all of them have to compute, as far as no prefix is cached."""
        self.shortest_first: ShortestFirstQueue[S] | None = None
        """Whose turn it is; None while they go as they came."""
        self._sequences: OrderedDict[RequestId, S] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: S) -> bool:
        return sequence.request.request_id in self._sequences

    @property
    def first(self) -> S:
        """The one whose turn it is; there must be one, and ranked."""
        return (
            next(iter(self._sequences.values())) if self.shortest_first is None else self.shortest_first.first
        )

    def reorder(self, shortest_first: ShortestFirstQueue[S] | None) -> None:
        """Go by other turns, which nobody has yet, from now on; None is as they came."""
        self.shortest_first = shortest_first
        waiting = sorted(self._sequences.values(), key=lambda sequence: sequence.arrival)
        self._sequences = OrderedDict((sequence.request.request_id, sequence) for sequence in waiting)
        if shortest_first is not None:
            for sequence in waiting:
                shortest_first.come(sequence)

    def push(self, sequence: S) -> None:
        self._add(sequence)
        if self.shortest_first is not None:
            self.shortest_first.come(sequence)

    def push_front(self, sequence: S) -> None:
        self._add(sequence)
        self._sequences.move_to_end(sequence.request.request_id, last=False)
        if self.shortest_first is not None:
            self.shortest_first.come_back(sequence)

    def rank_new(self, count: Callable[[S], int]) -> None:
        """See whose turn it is, also of those that came last; `count` says how many tokens each lacks."""
        if self.shortest_first is not None:
            self.shortest_first.rank_new(count)

    def remove(self, sequence: S) -> None:
        del self._sequences[sequence.request.request_id]
        self.num_tokens -= sequence.known
        if self.shortest_first is not None:
            self.shortest_first.leave(sequence)

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        waiting = list(self._sequences.values())
        assert self.num_tokens == sum(sequence.known for sequence in waiting), "tokens are miscounted"
        if self.shortest_first is not None:
            self.shortest_first.check()
            return
        arrivals = [sequence.arrival for sequence in waiting]
        assert arrivals == sorted(arrivals), "an older request waits behind a newer one"

    def _add(self, sequence: S) -> None:
        self._sequences[sequence.request.request_id] = sequence
        self.num_tokens += sequence.known
