"""Whose prompt is computed next where that is not who came first: the shortest, less what waiting has earned it.

A request's rank is the prompt tokens it lacks, plus `ageing` for each prompt token that the engine had computed before it
came; the lowest is next. Work is counted in prompt tokens and so is waiting, so this needs no clock, and is the same at
whatever speed. Who lacks n tokens is overtaken by those that come while the engine computes n / `ageing` more, and by nobody
who comes later.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """A request, waiting or running.

    arrival:      its number
    since_tokens: prompt tokens that its engine had computed when it came
    rank:         while it waits; None before it is known what it lacks
    """

    arrival: int
    since_tokens: int
    rank: float | None


S = TypeVar("S", bound=Ranked)


class ShortestFirstQueue(Generic[S]):
    """The requests that wait, by rank; one scheduler owns it, and knows them by other means too."""

    def __init__(self, ageing: float) -> None:
        """Begin empty."""
        self._ageing = ageing
        self._new: dict[int, S] = {}  # by arrival
        self._order: list[tuple[float, int, S]] = []  # (rank, arrival, ...), sorted

    def __iter__(self) -> Iterator[S]:
        """Give those that are ranked, the first in turn first."""
        return (sequence for _, _, sequence in self._order)

    def come(self, sequence: S) -> None:
        """Take in one that has come, or that comes back before what it lacks is known."""
        sequence.rank = None
        self._new[sequence.arrival] = sequence

    def come_back(self, sequence: S) -> None:
        """Take in one that ran, and had to make room: it goes before all that have not run."""
        self._place(sequence, -math.inf)

    def rank_new(self, count: Callable[[S], int]) -> None:
        """Give those that have come their ranks; `count` says how many tokens each lacks."""
        if self._new:
            for sequence in self._new.values():
                self._place(sequence, self.rank_of(sequence, count(sequence)))
            self._new.clear()

    def rank_of(self, sequence: S, lacking: int) -> float:
        """Say the rank of one that lacks so many tokens, whether it waits or runs."""
        return lacking + self._ageing * sequence.since_tokens

    @property
    def first(self) -> S:
        """The one whose turn it is; all must be ranked, and there must be one."""
        return self._order[0][-1]

    def leave(self, sequence: S) -> None:
        """Let one go that is taken in or given up."""
        if sequence.rank is None:
            del self._new[sequence.arrival]
        else:
            del self._order[bisect_left(self._order, (sequence.rank, sequence.arrival))]

    def check(self) -> None:
        """Raise AssertionError where the order is broken."""
        keys = [(rank, arrival) for rank, arrival, _ in self._order]
        assert keys == sorted(keys), "shortest-first queue: the lowest rank first"
        for rank, arrival, sequence in self._order:
            assert (sequence.rank, sequence.arrival) == (rank, arrival), (
                "shortest-first queue: each at its own rank"
            )
        assert all(sequence.rank is None for sequence in self._new.values()), (
            "shortest-first queue: not ranked yet"
        )

    def _place(self, sequence: S, rank: float) -> None:
        sequence.rank = rank
        insort(self._order, (rank, sequence.arrival, sequence))
