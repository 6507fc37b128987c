"""The queue of requests that wait for the batch: first come first served, by turns of tenants, or by another rank."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from penstock.core.ids import RequestId
from penstock.engine.scheduling.order.ranked_queue import PromptOrder, Ranked, RankedQueue
from penstock.engine.scheduling.order.tenant_turns import TenantTurns


class Waiting(Ranked, Protocol):
    """A request as the queue sees it; `known` counts its prompt and output tokens so far."""

    @property
    def known(self) -> int: ...


S = TypeVar("S", bound=Waiting)


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
