"""The order of queued requests of one model: fair queueing between priorities, then between tenants, then by arrival and work.

A request that is sent early waits at the worker whose queue looked shortest then. A queued request goes to the worker that
is free first.

Requests of one lane may go to the same workers: those for one LoRA adapter, or for prefill workers. Lanes share the clocks, so a
tenant has one share of the model's workers, however many adapters it asks for.
"""

import math
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from penstock.core.errors import Overloaded
from penstock.core.types.requests import Request
from penstock.core.wire import num_tokens
from penstock.router.config import QueueConfig

_RATE_OVER = 64
"""The queue's rate is measured over so many requests that left last."""
_RETRY_AFTER_S_MAX = 60.0
_PRIORITIES = (-1, 0, 1)
NEAR_TOKENS = 1024
"""Tenants whose service differs by fewer tokens count as equally served, and the request that costs least goes first."""

Lane = tuple[str | None, bool]
"""(LoRA adapter, whether the request waits for prefill workers)."""


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
    lane: Lane = (None, False)
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
    """One tenant's queued requests of one priority, by lane and turn; `served` is the tenant's virtual clock, in tokens."""

    tenant: str
    served: float
    by_lane: dict[Lane, list[QueuedRequest]] = field(default_factory=dict)

    def lanes(self) -> list[Lane]:
        """Give its lanes by the turn of their first requests."""
        if len(self.by_lane) == 1:
            return list(self.by_lane)
        return sorted(self.by_lane, key=lambda lane: self.by_lane[lane][0].turn)


class _Lines:
    """The tenants of one priority; `served` is the priority's virtual clock, in tokens over weight."""

    def __init__(self, weight: float, config: QueueConfig) -> None:
        self.weight = weight
        self._credit = float(config.tenant_burst_tokens)
        self.served = 0.0
        self.by_tenant: dict[str, _Line] = {}
        self._clock = (
            0.0  # `served` of the tenant served last: a new tenant begins less than `_credit` before
        )
        self._ahead = 0.0  # the most that any tenant was served
        self._order: list[tuple[float, str]] = []  # (served, tenant), sorted
        self._left: OrderedDict[str, float] = OrderedDict()  # `served` of tenants with nothing waiting
        self._left_max = config.requests_max

    def __iter__(self) -> Iterator[_Line]:
        """Give the lines by turn."""
        return (self.by_tenant[tenant] for _, tenant in self._order)

    def beginning_with(self, first: _Line) -> Iterator[_Line]:
        """Give the lines by turn, from this one on."""
        start = bisect_left(self._order, (first.served, first.tenant))
        return (self.by_tenant[tenant] for _, tenant in islice(self._order, start, None))

    def add(self, queued: QueuedRequest) -> None:
        line = self.by_tenant.get(queued.tenant)
        if line is None:
            served = max(self._left.pop(queued.tenant, -math.inf), self._clock - self._credit)
            line = self.by_tenant[queued.tenant] = _Line(queued.tenant, served)
            insort(self._order, (line.served, line.tenant))
        insort(line.by_lane.setdefault(queued.lane, []), queued, key=_turn)

    def remove(self, queued: QueuedRequest, *, charged: bool) -> None:
        line = self.by_tenant[queued.tenant]
        beside = line.by_lane[queued.lane]
        del beside[bisect_left(beside, queued.turn, key=_turn)]
        if not beside:
            del line.by_lane[queued.lane]
        del self._order[bisect_left(self._order, (line.served, line.tenant))]
        if charged:
            self._clock = max(self._clock, line.served)
            self.served += queued.tokens / self.weight
            line.served += queued.tokens
            self._ahead = max(self._ahead, line.served)
        if line.by_lane:
            insort(self._order, (line.served, line.tenant))
            return
        del self.by_tenant[queued.tenant]
        self._remember(queued.tenant, line.served)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge a tenant that has nothing waiting for prompts that were sent before anything waited."""
        served = self._left.pop(tenant, self._clock - self._credit) + tokens
        self._ahead = max(self._ahead, served)
        self._remember(tenant, served)

    def is_behind(self, queued: QueuedRequest) -> bool:
        """Say whether its tenant was served less than some other one, also with this request."""
        return self.by_tenant[queued.tenant].served + queued.tokens <= self._ahead

    def _remember(self, tenant: str, served: float) -> None:
        if served > self._clock - self._credit:
            self._left[tenant] = served
            if len(self._left) > self._left_max:
                self._left.popitem(last=False)

    def check(self) -> None:
        lines = self.by_tenant
        assert self._order == sorted((line.served, tenant) for tenant, line in lines.items()), (
            "in order of turn"
        )
        assert all(line.by_lane and line.tenant == tenant for tenant, line in lines.items()), "no empty lines"
        assert not lines.keys() & self._left.keys(), "a tenant waits or is remembered, not both"
        assert len(self._left) <= self._left_max, f"{len(self._left)} tenants remembered, past the bound"
        for line in lines.values():
            for lane, waiting in line.by_lane.items():
                turns = [queued.turn for queued in waiting]
                assert turns, f"{line.tenant}: no empty lanes"
                assert turns == sorted(set(turns)), f"{line.tenant}: in order of turn, got {turns}"
                assert all(queued.lane == lane for queued in waiting), f"{line.tenant}: each in its lane"


class FairQueue:
    """The queued requests of one model, bounded. Not thread-safe; one event loop owns it."""

    def __init__(self, config: QueueConfig, sent_tokens: Mapping[str, int] | None = None) -> None:
        """Begin without requests.

        Args:
            config: of the queue.
            sent_tokens: prompt tokens by tenant that workers have still to compute; each tenant is charged for its own.
        """
        self._config = config
        self._by_priority = {
            priority: _Lines(config.priority_factor**priority, config)
            for priority in reversed(_PRIORITIES)  # of equally served ones the highest goes first
        }
        for lines in self._by_priority.values():
            for tenant, tokens in (sent_tokens or {}).items():
                lines.charge(tenant, tokens)
        self._num_queued = self._num_seen = 0
        self._share_s = 0.0
        self._of_tenant: dict[str, int] = {}
        self._of_lane: dict[Lane, int] = {}
        self._clock = 0.0
        self._left_at_s: deque[float] = deque(maxlen=_RATE_OVER)

    def __len__(self) -> int:
        return self._num_queued

    @property
    def lanes(self) -> Collection[Lane]:
        """The lanes in which requests wait."""
        return self._of_lane.keys()

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
        self._of_lane[queued.lane] = self._of_lane.get(queued.lane, 0) + 1
        lines.add(queued)

    def discard(self, queued: QueuedRequest) -> None:
        """Forget a queued request that is given up."""
        self._remove(queued, charged=False)

    def heads(self) -> Iterator[Sequence[QueuedRequest]]:
        """Give the requests that may be next in each lane, at most `looked_at_max` of one; the lane with the turn first.

        The first of each has the turn in its lane. Those beside it have its priority, and belong to tenants that were served
        hardly more: a prompt, and at most `NEAR_TOKENS`. A change of the queue ends the iteration.
        """
        seen: set[Lane] = set()
        busy = [lines for lines in self._by_priority.values() if lines.by_tenant]
        for lines in sorted(busy, key=lambda lines: lines.served):
            for line in lines:
                for lane in line.lanes():
                    if lane not in seen:
                        seen.add(lane)
                        yield self._beside(line, lane, lines)
                if len(seen) == len(self._of_lane):
                    return

    def _beside(self, first: _Line, lane: Lane, lines: _Lines) -> Sequence[QueuedRequest]:
        """Give the candidates of a lane, of which `first` is the least served tenant."""
        looked_at = self._config.looked_at_max if self._config.work_weight else 1
        level = first.served + min(first.by_lane[lane][0].tokens, NEAR_TOKENS)
        in_reach = takewhile(lambda line: line.served <= level, lines.beginning_with(first))
        near = list(islice((line for line in in_reach if lane in line.by_lane), looked_at))
        each = max(looked_at // len(near), 1)
        return [queued for line in near for queued in line.by_lane[lane][:each]]

    def is_behind(self, queued: QueuedRequest) -> bool:
        """Say whether a queued request's tenant is below its share, also with this request: it need not wait for prompts of others."""
        return self._by_priority[_priority(queued.request)].is_behind(queued)

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
        waiting = [
            queued
            for lines in self._by_priority.values()
            for line in lines
            for beside in line.by_lane.values()
            for queued in beside
        ]
        assert len(waiting) == self._num_queued, f"{self._num_queued} are counted, {len(waiting)} wait"
        assert math.isclose(self._share_s, sum(queued.share_s for queued in waiting), abs_tol=1e-6), (
            f"shares of queued requests: {self._share_s}"
        )
        assert self._num_queued <= self._config.requests_max, f"{self._num_queued} wait, past the bound"
        of_tenant: dict[str, int] = {}
        for queued in waiting:
            of_tenant[queued.tenant] = of_tenant.get(queued.tenant, 0) + 1
        assert of_tenant == self._of_tenant, f"tenants: {self._of_tenant}, but {of_tenant} wait"
        of_lane = Counter(queued.lane for queued in waiting)
        assert of_lane == self._of_lane, f"lanes: {self._of_lane}, but {of_lane} wait"
        for lines in self._by_priority.values():
            lines.check()

    def _remove(self, queued: QueuedRequest, *, charged: bool) -> None:
        self._by_priority[_priority(queued.request)].remove(queued, charged=charged)
        self._num_queued -= 1
        self._share_s -= queued.share_s
        self._of_tenant[queued.tenant] -= 1
        if not self._of_tenant[queued.tenant]:
            del self._of_tenant[queued.tenant]
        self._of_lane[queued.lane] -= 1
        if not self._of_lane[queued.lane]:
            del self._of_lane[queued.lane]

    def _refusal(self, message: str, queued: QueuedRequest) -> Overloaded:
        return Overloaded(message, retry_after_s=retry_after_s(self.drain_s(queued.since_s, queued.wait_s)))


def retry_after_s(drain_s: float) -> int:
    """Give the Retry-After of a refused request, from the seconds until the queue has drained."""
    return math.ceil(min(max(drain_s, 1.0), _RETRY_AFTER_S_MAX))


def _priority(request: Request) -> int:
    return min(max(request.priority, _PRIORITIES[0]), _PRIORITIES[-1])
