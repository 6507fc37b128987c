"""Who is held, who is next, and who is refused; the clock is a number."""

from collections.abc import Sequence

import pytest

from penstock.core.errors import Overloaded
from penstock.core.ids import RequestId
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.router.config import QueueConfig
from penstock.router.fair_queue import FairQueue, QueuedRequest


def queued(
    name: str,
    *,
    tokens: int = 10,
    tenant: str = "",
    priority: int = 0,
    since_s: float = 0.0,
    work_s: float = 0.0,
    **predicted: float,
) -> QueuedRequest:
    request = Request(
        request_id=RequestId(name),
        model="m",
        token_ids=pack_tokens(range(tokens)),
        sampling=SamplingParams(max_tokens=1),
        tenant=tenant,
        priority=priority,
    )
    return QueuedRequest(request, since_s, work_s, **predicted)


def queue_of(*waiting: QueuedRequest, **settings: object) -> FairQueue:
    queue = FairQueue(QueueConfig(**({"tenant_burst_tokens": 0} | settings)))
    for one in waiting:
        queue.put(one)
        queue.check()
    return queue


def candidates(queue: FairQueue) -> Sequence[QueuedRequest]:
    return next(queue.heads())


def names(waiting: object) -> list[str]:
    return [str(one.request.request_id) for one in waiting]


def drained(queue: FairQueue) -> list[str]:
    """Take all, the first candidate each time."""
    order = []
    while len(queue):
        one = candidates(queue)[0]
        queue.take(one, 0.0)
        queue.check()
        order.append(one)
    return names(order)


def test_a_second_of_work_counts_as_much_as_having_come_later():
    queue = queue_of(
        queued("large", since_s=0.0, work_s=3.0),
        queued("small", since_s=10.0, work_s=1.0),
        queued("late", since_s=21.0, work_s=1.0),
        work_weight=10.0,
    )
    assert drained(queue) == ["small", "large", "late"]


def test_the_largest_is_not_overtaken_for_ever():
    queue = queue_of(queued("huge", work_s=1e9), work_weight=10.0, overtaken_s_max=5.0)
    for second in range(1, 10):
        queue.put(queued(str(second), since_s=float(second)))
    assert drained(queue) == ["1", "2", "3", "4", "huge", "5", "6", "7", "8", "9"]


def test_the_time_to_come_back_is_what_the_queue_takes_to_drain():
    queue = queue_of(*(queued(str(n)) for n in range(40)), requests_max=80)
    for second in range(20):
        queue.take(candidates(queue)[0], float(second))
    assert queue.drain_s(20.0) == pytest.approx(20.0)
    for n in range(20):
        queue.put(queued(f"new{n}", since_s=20.0))
    with pytest.raises(Overloaded) as refused:
        queue.put(queued("more", since_s=20.0))
    assert refused.value.retry_after_s == pytest.approx(40.0)


def test_queue_keys_come_in_order_of_turn_and_a_lower_priority_adds_only_its_own():
    queue = queue_of(
        queued("low1", priority=-1, queue_key=("one", False)),
        queued("low2", priority=-1, queue_key=("two", False)),
        queued("a1", tenant="a", tokens=30, queue_key=("one", False), since_s=5.0),
        queued("a2", tenant="a", queue_key=(None, False), since_s=1.0),
        queued("b", tenant="b", queue_key=(None, False)),
        work_weight=0,
    )
    assert [names(head) for head in queue.heads()] == [["a2"], ["a1"], ["low2"]]
    queue.take(candidates(queue)[0], 0.0)
    assert [names(head) for head in queue.heads()] == [["low1"], ["low2"], ["b"]], (
        "the least served priority first"
    )


def test_prompts_that_were_sent_before_any_waited_are_charged():
    queue = FairQueue(QueueConfig(tenant_burst_tokens=40), {"a": 100})
    first, other = queued("a0", tenant="a"), queued("b0", tenant="b")
    for one in (first, other):
        queue.put(one)
        queue.check()
    assert [queue.is_behind(one) for one in (first, other)] == [False, True]
    assert drained(queue) == ["b0", "a0"]
