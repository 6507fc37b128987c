"""The order of a scheduler's prompts: as they came, shortest first, or in turns of tenants."""

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from penstock.core.ids import RequestId
from penstock.core.types.requests import Request


class Ranked(Protocol):
    """A request, waiting or running.

    arrival:      sequence number of its arrival
    since_tokens: prompt tokens that the engine had computed in total when it arrived
    rank:         None until its tokens to compute are counted
    turn_end:     its tenant's clock when its prompt ends; None until `TenantTurns` has ranked it
    known:        tokens of its prompt and its output so far
    """

    request: Request
    arrival: int
    since_tokens: int
    rank: float | None
    turn_end: float | None

    @property
    def known(self) -> int: ...


class PromptOrder(Protocol):
    """Ranks requests. The rank of a waiting request does not change; the rank of a running request is asked for in each step.

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


class ShortestFirst:
    """A `PromptOrder`: fewest missing tokens first, with ageing.

    A request's rank is the number of prompt tokens it still has to compute, plus `ageing` times the prompt tokens that the
    engine had computed in total when the request arrived. Waiting is counted in prompt tokens too, so the order needs no clock
    and is the same at any speed. A request with n tokens to compute can be overtaken only by requests that arrive while the
    engine computes the next n / `ageing` tokens.
    """

    turn_tokens: int | None = None

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def rank(self, sequence: Ranked, lacking: int) -> float:
        return lacking + self._ageing * sequence.since_tokens

    def note(self, sequence: Ranked, left: int) -> None:
        """Need to know nothing of what is computed."""

    def on_idle(self) -> None:
        """Nothing to reset."""


CREDIT_TOKENS = 32_768
"""As `router.queue.tenant_burst_tokens` by default: a prompt that the router lets past others overtakes them in the worker too."""
TURN_TOKENS = 2048
"""A prompt of 32,000 tokens in steps of 8,192 moves another tenant's p99 TTFT by 1.86, in steps of 2,048 by 1.47; these cost 3 % of its speed."""
_TENANTS_MAX = 1024
"""Clocks that are kept; those that moved last."""


class TenantTurns:
    """A `PromptOrder`: start-time fair queueing by chunks of prompts, first come first served within a tenant.

    Each tenant has a virtual clock: the prompt tokens it was served. A prompt begins where its tenant's clock stands. Its rank is
    that, plus what is computed of the prompt. So a prompt that was begun is overtaken by one of a tenant that was served less. A
    tenant's clock is at most `CREDIT_TOKENS` behind the clock that is ahead: a quiet tenant may get that much at once. All clocks
    are equal again whenever no prompt is left. A tenant that begins a flood then is not ahead of one that asks all the time.
    """

    turn_tokens: int | None = TURN_TOKENS

    def __init__(self, tenant: str) -> None:
        """Begin with one tenant's requests, which have all been served equally."""
        self._clocks: OrderedDict[str, float] = OrderedDict({tenant: 0.0})
        self._ahead = self._floor = 0.0

    def rank(self, sequence: Ranked, lacking: int) -> float:
        if sequence.turn_end is None:
            tenant = sequence.request.tenant
            start = max(self._clocks.pop(tenant, self._floor), self._ahead - CREDIT_TOKENS)
            sequence.turn_end = self._clocks[tenant] = start + lacking
            if len(self._clocks) > _TENANTS_MAX:
                self._clocks.popitem(last=False)
        return sequence.turn_end - lacking

    def note(self, sequence: Ranked, left: int) -> None:
        if sequence.turn_end is not None:
            self._ahead = max(self._ahead, sequence.turn_end - left)

    def on_idle(self) -> None:
        """Set all clocks to the one that is ahead."""
        if self._clocks:
            self._floor = self._ahead = max(self._ahead, *self._clocks.values())
            self._clocks.clear()


class WaitingQueue(Generic[S]):
    """A queue with removal from any position; preempted requests return to its front. The scheduler bounds its length."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens of all waiting requests; cached prefixes are not subtracted."""
        self.ranked: RankedQueue[S] | None = None
        """Their order; None: first come first served, as all of them are one tenant's."""
        self._tenant: str | None = None  # of the last one
        self._sequences: OrderedDict[RequestId, S] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[S]:
        """Yield the requests, the next one first; `rank_new` must have run."""
        return iter(self._sequences.values() if self.ranked is None else self.ranked)

    def __contains__(self, sequence: S) -> bool:
        return sequence.request.request_id in self._sequences

    @property
    def first(self) -> S:
        """The next request. The queue must not be empty, and `rank_new` must have run."""
        return next(iter(self._sequences.values())) if self.ranked is None else self.ranked.first

    @property
    def turn_tokens(self) -> int | None:
        """Most tokens of one prompt in a step while tenants take turns; None: they do not."""
        return None if self.ranked is None else self.ranked.order.turn_tokens

    def reorder(self, order: PromptOrder | None) -> None:
        """Switch to another order. None: first come first served, and turns of tenants once there are several."""
        self._tenant = None
        waiting = sorted(self._sequences.values(), key=lambda sequence: sequence.arrival)
        self._sequences = OrderedDict((sequence.request.request_id, sequence) for sequence in waiting)
        self.ranked = None if order is None else RankedQueue(order)
        if self.ranked is not None:
            for sequence in waiting:
                self.ranked.push(sequence)

    def push(self, sequence: S) -> None:
        tenant = sequence.request.tenant
        if self.ranked is None and self._tenant not in {None, tenant}:
            self.reorder(TenantTurns(self._tenant or ""))
        self._tenant = tenant
        self._add(sequence)
        if self.ranked is not None:
            self.ranked.push(sequence)

    def note(self, sequence: S, left: int) -> None:
        """Note that a step leaves a prompt that was admitted so many tokens to compute."""
        if self.ranked is not None:
            self.ranked.order.note(sequence, left)

    def push_front(self, sequence: S) -> None:
        self._add(sequence)
        self._sequences.move_to_end(sequence.request.request_id, last=False)
        if self.ranked is not None:
            self.ranked.push_front(sequence)

    def rank_new(self, count: Callable[[S], int]) -> None:
        """Rank requests that were pushed since; `count` returns how many tokens a request has to compute."""
        if self.ranked is not None:
            self.ranked.rank_new(count)

    def remove(self, sequence: S) -> None:
        del self._sequences[sequence.request.request_id]
        self.num_tokens -= sequence.known
        if self.ranked is not None:
            self.ranked.remove(sequence)

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        waiting = list(self._sequences.values())
        assert self.num_tokens == sum(sequence.known for sequence in waiting), "tokens are miscounted"
        if self.ranked is not None:
            self.ranked.check()
            return
        arrivals = [sequence.arrival for sequence in waiting]
        assert arrivals == sorted(arrivals), "an older request waits behind a newer one"

    def _add(self, sequence: S) -> None:
        self._sequences[sequence.request.request_id] = sequence
        self.num_tokens += sequence.known
