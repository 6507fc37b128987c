"""The queue of requests that wait for the batch: first come first served, or shortest first."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from penstock.core.ids import RequestId
from penstock.core.types.requests import Request
from penstock.engine.scheduling.shortest_first_queue import Ranked, ShortestFirstQueue


class Waiting(Ranked, Protocol):
    """A request as the queue sees it; `known` counts its prompt and output tokens so far."""

    request: Request

    @property
    def known(self) -> int: ...


S = TypeVar("S", bound=Waiting)


class WaitingQueue(Generic[S]):
    """A queue with removal from any position; preempted requests return to its front. The scheduler bounds its length."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens of all waiting requests; cached prefixes are not subtracted."""
        self.shortest_first: ShortestFirstQueue[S] | None = None
        """Their order; None: first come first served."""
        self._sequences: OrderedDict[RequestId, S] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[S]:
        """Yield the requests, the next one first; `rank_new` must have run."""
        return iter(self._sequences.values() if self.shortest_first is None else self.shortest_first)

    def __contains__(self, sequence: S) -> bool:
        return sequence.request.request_id in self._sequences

    @property
    def first(self) -> S:
        """The next request. The queue must not be empty, and `rank_new` must have run."""
        return (
            next(iter(self._sequences.values())) if self.shortest_first is None else self.shortest_first.first
        )

    def reorder(self, shortest_first: ShortestFirstQueue[S] | None) -> None:
        """Switch to another order; `shortest_first` must be empty. None: first come first served."""
        self.shortest_first = shortest_first
        waiting = sorted(self._sequences.values(), key=lambda sequence: sequence.arrival)
        self._sequences = OrderedDict((sequence.request.request_id, sequence) for sequence in waiting)
        if shortest_first is not None:
            for sequence in waiting:
                shortest_first.push(sequence)

    def push(self, sequence: S) -> None:
        self._add(sequence)
        if self.shortest_first is not None:
            self.shortest_first.push(sequence)

    def push_front(self, sequence: S) -> None:
        self._add(sequence)
        self._sequences.move_to_end(sequence.request.request_id, last=False)
        if self.shortest_first is not None:
            self.shortest_first.push_front(sequence)

    def rank_new(self, count: Callable[[S], int]) -> None:
        """Rank requests that were pushed since; `count` returns how many tokens a request has to compute."""
        if self.shortest_first is not None:
            self.shortest_first.rank_new(count)

    def remove(self, sequence: S) -> None:
        del self._sequences[sequence.request.request_id]
        self.num_tokens -= sequence.known
        if self.shortest_first is not None:
            self.shortest_first.remove(sequence)

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
