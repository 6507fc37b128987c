"""The order of queued requests of one model: fair queueing between priorities, then between tenants, then by arrival and work.

A request that is sent early waits at the worker whose queue looked shortest then. A queued request goes to the worker that
is free first.

Requests with one queue key may go to the same workers: those for one LoRA adapter, or for prefill workers. All queue keys share the
virtual clocks, so a tenant has one share of the model's workers, however many adapters it asks for.
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

QueueKey = tuple[str | None, bool]
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
    queue_key: QueueKey = (None, False)
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
class _TenantQueue:
    """One tenant's queued requests of one priority, by queue key and turn; `served` is its virtual clock, in prompt tokens."""

    tenant: str
    served: float
    by_key: dict[QueueKey, list[QueuedRequest]] = field(default_factory=dict)

    def keys_in_turn(self) -> list[QueueKey]:
        """Give its queue keys by the turn of their first requests."""
        if len(self.by_key) == 1:
            return list(self.by_key)
        return sorted(self.by_key, key=lambda queue_key: self.by_key[queue_key][0].turn)


class _PriorityClass:
    """The tenants with queued requests of one priority; `served` is its virtual clock, in prompt tokens over weight."""

    def __init__(self, weight: float, config: QueueConfig) -> None:
        self.weight = weight
        self._credit = float(config.tenant_burst_tokens)
        self.served = 0.0
        self.by_tenant: dict[str, _TenantQueue] = {}
        self._clock = (
            0.0  # `served` of the tenant served last: a new tenant begins less than `_credit` before
        )
        self._ahead = 0.0  # the most that any tenant was served
        self._order: list[tuple[float, str]] = []  # (served, tenant), sorted
        self._left: OrderedDict[str, float] = OrderedDict()  # `served` of tenants with nothing waiting
        self._left_max = config.requests_max

    def __iter__(self) -> Iterator[_TenantQueue]:
        """Give the tenants' queues, the least served first."""
        return (self.by_tenant[tenant] for _, tenant in self._order)

    def beginning_with(self, first: _TenantQueue) -> Iterator[_TenantQueue]:
        """Give the tenants' queues from this one on, the least served first."""
        start = bisect_left(self._order, (first.served, first.tenant))
        return (self.by_tenant[tenant] for _, tenant in islice(self._order, start, None))

    def add(self, queued: QueuedRequest) -> None:
        queue = self.by_tenant.get(queued.tenant)
        if queue is None:
            served = max(self._left.pop(queued.tenant, -math.inf), self._clock - self._credit)
            queue = self.by_tenant[queued.tenant] = _TenantQueue(queued.tenant, served)
            insort(self._order, (queue.served, queue.tenant))
        insort(queue.by_key.setdefault(queued.queue_key, []), queued, key=_turn)

    def remove(self, queued: QueuedRequest, *, charged: bool) -> None:
        queue = self.by_tenant[queued.tenant]
        beside = queue.by_key[queued.queue_key]
        del beside[bisect_left(beside, queued.turn, key=_turn)]
        if not beside:
            del queue.by_key[queued.queue_key]
        del self._order[bisect_left(self._order, (queue.served, queue.tenant))]
        if charged:
            self._clock = max(self._clock, queue.served)
            self.served += queued.tokens / self.weight
            queue.served += queued.tokens
            self._ahead = max(self._ahead, queue.served)
        if queue.by_key:
            insort(self._order, (queue.served, queue.tenant))
            return
        del self.by_tenant[queued.tenant]
        self._remember(queued.tenant, queue.served)

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
        queues = self.by_tenant
        assert self._order == sorted((queue.served, tenant) for tenant, queue in queues.items()), (
            "in order of turn"
        )
        assert all(queue.by_key and queue.tenant == tenant for tenant, queue in queues.items()), (
            "no empty queues"
        )
        assert not queues.keys() & self._left.keys(), "a tenant waits or is remembered, not both"
        assert len(self._left) <= self._left_max, f"{len(self._left)} tenants remembered, past the bound"
        for queue in queues.values():
            for queue_key, waiting in queue.by_key.items():
                turns = [queued.turn for queued in waiting]
                assert turns, f"{queue.tenant}: no queue key without requests"
                assert turns == sorted(set(turns)), f"{queue.tenant}: in order of turn, got {turns}"
                assert all(queued.queue_key == queue_key for queued in waiting), (
                    f"{queue.tenant}: each under its queue key"
                )


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
            priority: _PriorityClass(config.priority_factor**priority, config)
            for priority in reversed(_PRIORITIES)  # of equally served ones the highest goes first
        }
        for priority_class in self._by_priority.values():
            for tenant, tokens in (sent_tokens or {}).items():
                priority_class.charge(tenant, tokens)
        self._num_queued = self._num_seen = 0
        self._share_s = 0.0
        self._of_tenant: dict[str, int] = {}
        self._of_key: dict[QueueKey, int] = {}
        self._clock = 0.0
        self._left_at_s: deque[float] = deque(maxlen=_RATE_OVER)

    def __len__(self) -> int:
        return self._num_queued

    @property
    def queue_keys(self) -> Collection[QueueKey]:
        """The queue keys with queued requests."""
        return self._of_key.keys()

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
        priority_class = self._by_priority[_priority(queued.request)]
        if not priority_class.by_tenant:
            priority_class.served = max(priority_class.served, self._clock)
        queued.turn = self.turn_s(queued, queued.work_s), self._num_seen
        self._num_seen += 1
        self._num_queued += 1
        self._share_s += queued.share_s
        self._of_tenant[queued.tenant] = mine + 1
        self._of_key[queued.queue_key] = self._of_key.get(queued.queue_key, 0) + 1
        priority_class.add(queued)

    def discard(self, queued: QueuedRequest) -> None:
        """Forget a queued request that is given up."""
        self._remove(queued, charged=False)

    def heads(self) -> Iterator[Sequence[QueuedRequest]]:
        """Give the candidates to leave next, at most `looked_at_max` for each queue key, in order of turn.

        The first candidate of each has the turn for its queue key. The others have its priority, and their tenants were served
        at most a prompt more, `NEAR_TOKENS` at most. A change of the queue ends the iteration.
        """
        seen: set[QueueKey] = set()
        busy = [priority_class for priority_class in self._by_priority.values() if priority_class.by_tenant]
        for priority_class in sorted(busy, key=lambda priority_class: priority_class.served):
            for queue in priority_class:
                for queue_key in queue.keys_in_turn():
                    if queue_key not in seen:
                        seen.add(queue_key)
                        yield self._beside(queue, queue_key, priority_class)
                if len(seen) == len(self._of_key):
                    return

    def _beside(
        self, first: _TenantQueue, queue_key: QueueKey, priority_class: _PriorityClass
    ) -> Sequence[QueuedRequest]:
        """Give the candidates of a queue key; `first` is the queue of the least served tenant."""
        looked_at = self._config.looked_at_max if self._config.work_weight else 1
        level = first.served + min(first.by_key[queue_key][0].tokens, NEAR_TOKENS)
        in_reach = takewhile(lambda queue: queue.served <= level, priority_class.beginning_with(first))
        near = list(islice((queue for queue in in_reach if queue_key in queue.by_key), looked_at))
        each = max(looked_at // len(near), 1)
        return [queued for queue in near for queued in queue.by_key[queue_key][:each]]

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
            for priority_class in self._by_priority.values()
            for queue in priority_class
            for beside in queue.by_key.values()
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
        of_key = Counter(queued.queue_key for queued in waiting)
        assert of_key == self._of_key, f"queue keys: {self._of_key}, but {of_key} wait"
        for priority_class in self._by_priority.values():
            priority_class.check()

    def _remove(self, queued: QueuedRequest, *, charged: bool) -> None:
        self._by_priority[_priority(queued.request)].remove(queued, charged=charged)
        self._num_queued -= 1
        self._share_s -= queued.share_s
        self._of_tenant[queued.tenant] -= 1
        if not self._of_tenant[queued.tenant]:
            del self._of_tenant[queued.tenant]
        self._of_key[queued.queue_key] -= 1
        if not self._of_key[queued.queue_key]:
            del self._of_key[queued.queue_key]

    def _refusal(self, message: str, queued: QueuedRequest) -> Overloaded:
        return Overloaded(message, retry_after_s=retry_after_s(self.drain_s(queued.since_s, queued.wait_s)))


def retry_after_s(drain_s: float) -> int:
    """Give the Retry-After of a refused request, from the seconds until the queue has drained."""
    return math.ceil(min(max(drain_s, 1.0), _RETRY_AFTER_S_MAX))


def _priority(request: Request) -> int:
    return min(max(request.priority, _PRIORITIES[0]), _PRIORITIES[-1])
