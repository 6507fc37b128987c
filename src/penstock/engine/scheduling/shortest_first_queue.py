"""Shortest-prompt-first order with ageing.

A request's rank is the number of prompt tokens it still has to compute, plus `ageing` times the prompt tokens that the
engine had computed in total when the request arrived; the lowest rank is next. Waiting is counted in prompt tokens too, so
the order needs no clock and is the same at any speed. A request with n tokens to compute can be overtaken only by requests
that arrive while the engine computes the next n / `ageing` tokens.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """A request, waiting or running.

    arrival:      sequence number of its arrival
    since_tokens: prompt tokens that the engine had computed in total when it arrived
    rank:         None until its tokens to compute are counted
    """

    arrival: int
    since_tokens: int
    rank: float | None


S = TypeVar("S", bound=Ranked)


class ShortestFirstQueue(Generic[S]):
    """The waiting requests by rank. A `WaitingQueue` owns it."""

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing
        self._new: dict[int, S] = {}  # by arrival
        self._order: list[tuple[float, int, S]] = []  # (rank, arrival, ...), sorted

    def __iter__(self) -> Iterator[S]:
        """Yield the ranked requests, the next one first."""
        return (sequence for _, _, sequence in self._order)

    def push(self, sequence: S) -> None:
        """Add a request that has no rank yet."""
        sequence.rank = None
        self._new[sequence.arrival] = sequence

    def push_front(self, sequence: S) -> None:
        """Add a preempted request before all requests that have not run."""
        self._insert(sequence, -math.inf)

    def rank_new(self, count: Callable[[S], int]) -> None:
        """Rank the requests that were pushed since; `count` returns how many tokens a request has to compute."""
        if self._new:
            for sequence in self._new.values():
                self._insert(sequence, self.rank_of(sequence, count(sequence)))
            self._new.clear()

    def rank_of(self, sequence: S, lacking: int) -> float:
        """Return the rank of a waiting or running request with `lacking` tokens to compute."""
        return lacking + self._ageing * sequence.since_tokens

    @property
    def first(self) -> S:
        """The next request. The queue must not be empty, and all requests must be ranked."""
        return self._order[0][-1]

    def remove(self, sequence: S) -> None:
        """Remove a request that was admitted or aborted."""
        if sequence.rank is None:
            del self._new[sequence.arrival]
        else:
            del self._order[bisect_left(self._order, (sequence.rank, sequence.arrival))]

    def check(self) -> None:
        """Raise AssertionError if the order is broken."""
        keys = [(rank, arrival) for rank, arrival, _ in self._order]
        assert keys == sorted(keys), "shortest-first queue: the lowest rank first"
        for rank, arrival, sequence in self._order:
            assert (sequence.rank, sequence.arrival) == (rank, arrival), (
                "shortest-first queue: each at its own rank"
            )
        assert all(sequence.rank is None for sequence in self._new.values()), (
            "shortest-first queue: not ranked yet"
        )

    def _insert(self, sequence: S, rank: float) -> None:
        sequence.rank = rank
        insort(self._order, (rank, sequence.arrival, sequence))
