"""The order of queued requests: fair queueing between priorities, then between tenants, then by arrival and work.

A request that is sent early waits at the worker whose queue looked shortest then. A queued request goes to the worker that
is free first.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from penstock.core.errors import Overloaded
from penstock.core.types.requests import Request
from penstock.core.wire import num_tokens
from penstock.router.config import QueueConfig

_RATE_OVER = 64
"""The queue's rate is measured over so many requests that left last."""
_RETRY_AFTER_S_MAX = 60.0
_PRIORITIES = (-1, 0, 1)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One queued request. `turn` orders the requests of one tenant and priority: (loop time, a number)."""

    request: Request
    since_s: float
    work_s: float
    """Predicted seconds of work on the best worker, at arrival."""
    wait_s: float = 0.0
    """Predicted seconds until some worker has room, at arrival."""
    share_s: float = 0.0
    """Seconds that all workers together need for its prompt, uncached."""
    turn: tuple[float, int] = (0.0, 0)

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def tokens(self) -> int:
        """What the request is charged in its tenant's share: prompt tokens."""
        return num_tokens(self.request.token_ids)


def _turn(queued: QueuedRequest) -> tuple[float, int]:
    return queued.turn


@dataclass(slots=True, eq=False)
class _Line:
    """One tenant's queued requests of one priority, by turn; `served` is the tenant's virtual clock, in tokens."""

    tenant: str
    served: float
    queued: list[QueuedRequest] = field(default_factory=list)


class _Lines:
    """The tenants of one priority; `served` is the priority's virtual clock, in tokens over weight."""

    def __init__(self, weight: float, owing_max: int) -> None:
        self.weight = weight
        self.served = 0.0
        self.by_tenant: dict[str, _Line] = {}
        self._clock = 0.0  # `served` of the tenant served last: a new tenant begins there
        self._order: list[tuple[float, str]] = []  # (served, tenant), sorted
        self._owing: OrderedDict[str, float] = OrderedDict()  # `served` of tenants with nothing waiting
        self._owing_max = owing_max

    def __iter__(self) -> Iterator[_Line]:
        """Give the lines by turn."""
        return (self.by_tenant[tenant] for _, tenant in self._order)

    def add(self, queued: QueuedRequest) -> None:
        line = self.by_tenant.get(queued.tenant)
        if line is None:
            served = max(self._owing.pop(queued.tenant, 0.0), self._clock)
            line = self.by_tenant[queued.tenant] = _Line(queued.tenant, served)
            insort(self._order, (line.served, line.tenant))
        insort(line.queued, queued, key=_turn)

    def remove(self, queued: QueuedRequest, *, charged: bool) -> None:
        line = self.by_tenant[queued.tenant]
        del line.queued[bisect_left(line.queued, queued.turn, key=_turn)]
        del self._order[bisect_left(self._order, (line.served, line.tenant))]
        if charged:
            self._clock = max(self._clock, line.served)
            self.served += queued.tokens / self.weight
            line.served += queued.tokens
        if line.queued:
            insort(self._order, (line.served, line.tenant))
            return
        del self.by_tenant[queued.tenant]
        if line.served > self._clock:
            self._owing[queued.tenant] = line.served
            if len(self._owing) > self._owing_max:
                self._owing.popitem(last=False)

    def check(self) -> None:
        lines = self.by_tenant
        assert self._order == sorted((line.served, tenant) for tenant, line in lines.items()), (
            "in order of turn"
        )
        assert all(line.queued and line.tenant == tenant for tenant, line in lines.items()), "no empty lines"
        assert not lines.keys() & self._owing.keys(), "a tenant waits or is remembered, not both"
        assert len(self._owing) <= self._owing_max, f"{len(self._owing)} tenants remembered, past the bound"
        for line in lines.values():
            turns = [queued.turn for queued in line.queued]
            assert turns == sorted(set(turns)), f"{line.tenant}: in order of turn, got {turns}"


class FairQueue:
    """The queued requests of one queue key, bounded. Not thread-safe; one event loop owns it."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._by_priority = {
            priority: _Lines(config.priority_factor**priority, config.requests_max)
            for priority in _PRIORITIES
        }
        self._num_queued = self._num_seen = 0
        self._share_s = 0.0
        self._of_tenant: dict[str, int] = {}
        self._clock = 0.0
        self._left_at_s: deque[float] = deque(maxlen=_RATE_OVER)

    def __len__(self) -> int:
        return self._num_queued

    def put(self, queued: QueuedRequest) -> None:
        """Have a request wait.

        Raises:
            Overloaded: the queue is full, or its tenant has as many queued as there is room left. So one tenant alone gets half
                of the queue, and there is always room for another tenant.
        """
        model, size = queued.request.model, self._config.requests_max
        mine = self._of_tenant.get(queued.tenant, 0)
        if self._num_queued >= size:
            raise self._refusal(
                f"model {model}: every worker is busy and {self._num_queued} requests wait, the limit"
                " (router.queue.requests_max); try again later",
                queued,
            )
        if mine and mine >= size - self._num_queued:
            whose = f"tenant {queued.tenant!r}'s" if queued.tenant else "of no tenant"
            refusal = self._refusal(
                f"model {model}: every worker is busy, {self._num_queued} of at most {size} requests"
                f" (router.queue.requests_max) wait, and {mine} of them are {whose}, as many as there is room left or"
                " more; try again later",
                queued,
            )
            refusal.http_status = 429
            raise refusal
        lines = self._by_priority[_priority(queued.request)]
        if not lines.by_tenant:
            lines.served = max(lines.served, self._clock)
        queued.turn = self.turn_s(queued, queued.work_s), self._num_seen
        self._num_seen += 1
        self._num_queued += 1
        self._share_s += queued.share_s
        self._of_tenant[queued.tenant] = mine + 1
        lines.add(queued)

    def discard(self, queued: QueuedRequest) -> None:
        """Forget a queued request that is given up."""
        self._remove(queued, charged=False)

    def candidates(self) -> Sequence[QueuedRequest]:
        """Give the requests that may be next, at most `looked_at_max`; the first has the turn.

        They have the priority whose turn it is, and belong to tenants within one prompt of the least served tenant.
        """
        if not self._num_queued:
            return ()
        busy = [lines for lines in self._by_priority.values() if lines.by_tenant]
        lines = min(busy, key=lambda lines: lines.served)
        looked_at = self._config.looked_at_max if self._config.work_weight else 1
        first = next(iter(lines))
        level = first.served + first.queued[0].tokens
        near = [line for line in islice(lines, looked_at) if line.served <= level]
        each = max(looked_at // len(near), 1)
        return [queued for line in near for queued in line.queued[:each]]

    def take(self, queued: QueuedRequest, now_s: float) -> None:
        """Release a candidate, and charge it to its tenant and its priority."""
        self._clock = max(self._clock, self._by_priority[_priority(queued.request)].served)
        self._left_at_s.append(now_s)
        self._remove(queued, charged=True)

    def turn_s(self, queued: QueuedRequest, work_s: float) -> float:
        """Give the sort key within a tenant: arrival time plus weighted work, in seconds."""
        return queued.since_s + min(self._config.work_weight * work_s, self._config.overtaken_s_max)

    def drain_s(self, now_s: float, wait_s: float = 0.0) -> float:
        """Predict the seconds until all queued requests have left, at the rate of the last that left.

        Before two have left, their prompts' work counts instead, from `wait_s` on, when there is room.
        """
        if len(self._left_at_s) < 2:
            return wait_s + self._share_s
        pace_s = (now_s - self._left_at_s[0]) / len(self._left_at_s)
        return self._num_queued * pace_s

    def check(self) -> None:
        """Raise AssertionError where counts, bounds or order are broken."""
        waiting = [h for lines in self._by_priority.values() for line in lines for h in line.queued]
        assert len(waiting) == self._num_queued, f"{self._num_queued} are counted, {len(waiting)} wait"
        assert math.isclose(self._share_s, sum(queued.share_s for queued in waiting), abs_tol=1e-6), (
            f"shares of queued requests: {self._share_s}"
        )
        assert self._num_queued <= self._config.requests_max, f"{self._num_queued} wait, past the bound"
        of_tenant: dict[str, int] = {}
        for queued in waiting:
            of_tenant[queued.tenant] = of_tenant.get(queued.tenant, 0) + 1
        assert of_tenant == self._of_tenant, f"tenants: {self._of_tenant}, but {of_tenant} wait"
        for lines in self._by_priority.values():
            lines.check()

    def _remove(self, queued: QueuedRequest, *, charged: bool) -> None:
        self._by_priority[_priority(queued.request)].remove(queued, charged=charged)
        self._num_queued -= 1
        self._share_s -= queued.share_s
        self._of_tenant[queued.tenant] -= 1
        if not self._of_tenant[queued.tenant]:
            del self._of_tenant[queued.tenant]

    def _refusal(self, message: str, queued: QueuedRequest) -> Overloaded:
        return Overloaded(message, retry_after_s=retry_after_s(self.drain_s(queued.since_s, queued.wait_s)))


def retry_after_s(drain_s: float) -> int:
    """Give the Retry-After of a refused request, from the seconds until the queue has drained."""
    return math.ceil(min(max(drain_s, 1.0), _RETRY_AFTER_S_MAX))


def _priority(request: Request) -> int:
    return min(max(request.priority, _PRIORITIES[0]), _PRIORITIES[-1])
