"""The waiting requests by rank, the lowest first. What a rank is, a `PromptOrder` says."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from penstock.core.types.requests import Request


class Ranked(Protocol):
    """A request, waiting or running.

    arrival:      sequence number of its arrival
    since_tokens: prompt tokens that the engine had computed in total when it arrived
    rank:         None until its tokens to compute are counted
    turn_end:     its tenant's clock when its prompt ends; None until `TenantTurns` has ranked it
    """

    request: Request
    arrival: int
    since_tokens: int
    rank: float | None
    turn_end: float | None


class PromptOrder(Protocol):
    """What a rank is. A waiting request's rank does not change; a running one's is asked for in each step.

    turn_tokens: most tokens of one prompt in a step while tenants take turns; None: they do not
    """

    turn_tokens: int | None

    def rank(self, sequence: Ranked, lacking: int) -> float:
        """Return the rank of a waiting or running request with `lacking` tokens to compute."""
        ...

    def note(self, sequence: Ranked, left: int) -> None:
        """Note that a step leaves a prompt so many tokens to compute."""
        ...

    def on_idle(self) -> None:
        """Note that no prompt waits or is being computed."""
        ...


S = TypeVar("S", bound=Ranked)


class RankedQueue(Generic[S]):
    """The waiting requests by rank. A `WaitingQueue` owns it."""

    def __init__(self, order: PromptOrder) -> None:
        self.order = order
        self._new: dict[int, S] = {}  # by arrival
        self._sorted: list[tuple[float, int, S]] = []  # (rank, arrival, ...), sorted

    def __iter__(self) -> Iterator[S]:
        """Yield the ranked requests, the next one first."""
        return (sequence for _, _, sequence in self._sorted)

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
                self._insert(sequence, self.order.rank(sequence, count(sequence)))
            self._new.clear()

    @property
    def first(self) -> S:
        """The next request. The queue must not be empty, and all requests must be ranked."""
        return self._sorted[0][-1]

    def remove(self, sequence: S) -> None:
        """Remove a request that was admitted or aborted."""
        if sequence.rank is None:
            del self._new[sequence.arrival]
        else:
            del self._sorted[bisect_left(self._sorted, (sequence.rank, sequence.arrival))]

    def check(self) -> None:
        """Raise AssertionError if the order is broken."""
        keys = [(rank, arrival) for rank, arrival, _ in self._sorted]
        assert keys == sorted(keys), "ranked queue: the lowest rank first"
        for rank, arrival, sequence in self._sorted:
            assert (sequence.rank, sequence.arrival) == (rank, arrival), "ranked queue: each at its own rank"
        assert all(sequence.rank is None for sequence in self._new.values()), "ranked queue: not ranked yet"

    def _insert(self, sequence: S, rank: float) -> None:
        sequence.rank = rank
        insort(self._sorted, (rank, sequence.arrival, sequence))
