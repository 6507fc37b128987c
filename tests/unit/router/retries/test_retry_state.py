"""One request's losses and refusals: how often it is tried again, and what it gets in the end."""

import random

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import Overloaded, Unavailable, WorkerLost
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.router.config import MigrationConfig, RetryConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.retries.retry_guard import RetryGuard
from penstock.router.retries.retry_state import RetryState

LOST = WorkerLost("worker w1: gone")
REQUEST = Request(
    request_id=RequestId("r"),
    model="tiny",
    token_ids=pack_tokens([1, 2, 3]),
    sampling=SamplingParams(max_tokens=9),
)


def make_retry_guard(migrations: MigrationConfig | None = None, **settings: float) -> RetryGuard:
    config = RetryConfig(per_request=0.0, **settings)
    migrations = migrations or MigrationConfig(jitter_s=0.0)
    return RetryGuard(config, migrations, metrics=RouterMetrics(CollectorRegistry()), rng=random.Random(0))


def migrations(retry_guard: RetryGuard, outcome: str) -> float:
    return retry_guard.metrics.migrations.labels(outcome)._value.get()


def test_losses_move_it_as_long_as_it_gets_on_between():
    retry_guard = make_retry_guard()
    retry_state = RetryState(REQUEST, retry_guard)
    for number in range(100):
        retry_state.on_loss(WorkerId(number), is_suspect=number % 3 > 0)
        assert retry_state.migrate(LOST, 30.0 * number, output_tokens=5) == 0.0
        retry_state.on_progress()
    assert retry_state.migrations == migrations(retry_guard, "moved") == 100
    assert not retry_state.needs_isolation
    assert not retry_guard.quarantine


def test_losses_without_getting_on_move_it_ever_later_until_it_has_stalled_too_long():
    retry_guard = make_retry_guard(MigrationConfig(jitter_s=0.0, backoff_s_max=2.0, stalled_s_max=30.0))
    retry_state = RetryState(REQUEST, retry_guard)
    now_s, waits = 10.0, []
    for number in range(20):
        retry_state.on_loss(WorkerId(number), is_suspect=False)
        waits.append(retry_state.migrate(LOST, now_s, output_tokens=5))
        now_s += 1.5
    assert waits[:7] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert waits[7:] == [2.0] * 13
    assert retry_state.migrate(LOST, 40.0, output_tokens=5) == 2.0
    with pytest.raises(Unavailable, match="request r: its servers failed again and again for 31 s") as caught:
        retry_state.migrate(LOST, 41.0, output_tokens=5)
    assert caught.value.__cause__ is LOST
    assert (migrations(retry_guard, "moved"), migrations(retry_guard, "stalled")) == (21, 1)


def test_workers_that_cannot_serve_it_for_now_are_tried_so_often():
    retry_guard = make_retry_guard(unavailable_max=3)
    retry_state = RetryState(REQUEST, retry_guard)
    problem = Unavailable("http://server: connection refused")
    for _ in range(2):
        waits = []
        for number in range(3):
            retry_state.on_unavailable(WorkerId(number % 2), problem)
            waits.append(retry_state.migrate(problem, 1.0, output_tokens=0))
        assert waits == [0.0, 0.1, 0.2]
        retry_state.on_progress()
    assert retry_state.lost == {0, 1}
    assert not retry_state.avoided, "tried again where there is no other"
    for number in range(3):
        retry_state.on_unavailable(WorkerId(number), problem)
    last = (
        r"request r: 4 workers in a row could not serve it \(router.retries.unavailable_max\); the last one: http://server:"
        " connection refused"
    )
    with pytest.raises(Unavailable, match=last) as caught:
        retry_state.on_unavailable(WorkerId(4), problem)
    assert caught.value.retry_after_s == 1.0
    assert migrations(retry_guard, "unavailable") == 1


def test_suspicions_lead_to_probation_and_then_to_quarantine():
    retry_guard = make_retry_guard(deaths_max=3, quarantine_s=60.0)
    retry_state = RetryState(REQUEST, retry_guard)
    retry_state.on_loss(WorkerId(1), is_suspect=True)
    assert not retry_state.needs_isolation
    retry_state.on_loss(WorkerId(2), is_suspect=True)
    assert retry_state.needs_isolation
    retry_state.on_loss(WorkerId(3), is_suspect=True)
    with pytest.raises(Unavailable, match="refused for 60 s") as caught:
        retry_state.migrate(LOST, 5.0, output_tokens=0)
    assert caught.value.retry_after_s == 60.0
    assert retry_guard.quarantine.remaining_s(REQUEST, 25.0) == 40.0
    assert migrations(retry_guard, "quarantined") == 1


def test_refusals_are_bounded_and_the_last_one_is_the_answer():
    retry_guard = make_retry_guard(refusals_max=2)
    retry_state = RetryState(REQUEST, retry_guard)
    refusals = [Overloaded(f"full {number}") for number in range(3)]
    for number in (0, 1):
        retry_state.on_refusal(WorkerId(number), refusals[number], 0.0)
        assert retry_state.last_refusal is refusals[number]
    with pytest.raises(Overloaded, match="full 2"):
        retry_state.on_refusal(WorkerId(2), refusals[2], 0.0)
    assert retry_state.avoided == {0, 1, 2}
    assert retry_state.migrations == 0
    assert retry_guard.metrics.refusals._value.get() == 3


def test_moves_wait_for_their_turn_and_refusals_need_the_budget():
    retry_guard = make_retry_guard(MigrationConfig(jitter_s=0.0, at_once=2, spread_s=1.0), burst=1, per_s=0.5)
    waits = [RetryState(REQUEST, retry_guard).migrate(LOST, 0.0, 0) for _ in range(4)]
    assert waits == [0.0, 0.0, 0.5, 1.0]
    RetryState(REQUEST, retry_guard).on_refusal(WorkerId(1), Overloaded("full"), 0.0)
    with pytest.raises(Overloaded, match="full"):
        RetryState(REQUEST, retry_guard).on_refusal(WorkerId(1), Overloaded("full"), 0.0)
    retry_guard.check()
