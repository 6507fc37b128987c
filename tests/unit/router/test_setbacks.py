"""One request's losses and refusals: how often it is tried again, and what it gets in the end."""

import random

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import Overloaded, Unavailable, WorkerLost
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.router.brakes import Brakes
from penstock.router.config import MigrationConfig, RetryConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.setbacks import Setbacks

LOST = WorkerLost("worker w1: gone")
REQUEST = Request(
    request_id=RequestId("r"),
    model="tiny",
    token_ids=pack_tokens([1, 2, 3]),
    sampling=SamplingParams(max_tokens=9),
)


def make_brakes(migrations: MigrationConfig | None = None, **settings: float) -> Brakes:
    config = RetryConfig(per_request=0.0, **settings)
    migrations = migrations or MigrationConfig(jitter_s=0.0)
    return Brakes(config, migrations, metrics=RouterMetrics(CollectorRegistry()), rng=random.Random(0))


def migrations(brakes: Brakes, outcome: str) -> float:
    return brakes.metrics.migrations.labels(outcome)._value.get()


def test_losses_move_it_as_long_as_it_gets_on_between():
    brakes = make_brakes()
    setbacks = Setbacks(REQUEST, brakes)
    for number in range(100):
        setbacks.on_loss(WorkerId(number), is_suspect=number % 3 > 0)
        assert setbacks.migrate(LOST, 30.0 * number, output_tokens=5) == 0.0
        setbacks.on_progress()
    assert setbacks.migrations == migrations(brakes, "moved") == 100
    assert not setbacks.needs_probation
    assert not brakes.quarantine


def test_losses_without_getting_on_move_it_ever_later_until_it_has_stalled_too_long():
    brakes = make_brakes(MigrationConfig(jitter_s=0.0, backoff_s_max=2.0, stalled_s_max=30.0))
    setbacks = Setbacks(REQUEST, brakes)
    now_s, waits = 10.0, []
    for number in range(20):
        setbacks.on_loss(WorkerId(number), is_suspect=False)
        waits.append(setbacks.migrate(LOST, now_s, output_tokens=5))
        now_s += 1.5
    assert waits[:7] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert waits[7:] == [2.0] * 13
    assert setbacks.migrate(LOST, 40.0, output_tokens=5) == 2.0
    with pytest.raises(Unavailable, match="request r: its servers failed again and again for 31 s") as caught:
        setbacks.migrate(LOST, 41.0, output_tokens=5)
    assert caught.value.__cause__ is LOST
    assert (migrations(brakes, "moved"), migrations(brakes, "stalled")) == (21, 1)


def test_suspicions_lead_to_probation_and_then_to_quarantine():
    brakes = make_brakes(deaths_max=3, quarantine_s=60.0)
    setbacks = Setbacks(REQUEST, brakes)
    setbacks.on_loss(WorkerId(1), is_suspect=True)
    assert not setbacks.needs_probation
    setbacks.on_loss(WorkerId(2), is_suspect=True)
    assert setbacks.needs_probation
    setbacks.on_loss(WorkerId(3), is_suspect=True)
    with pytest.raises(Unavailable, match="refused for 60 s") as caught:
        setbacks.migrate(LOST, 5.0, output_tokens=0)
    assert caught.value.retry_after_s == 60.0
    assert brakes.quarantine.remaining_s(REQUEST, 25.0) == 40.0
    assert migrations(brakes, "quarantined") == 1


def test_refusals_are_bounded_and_the_last_one_is_the_answer():
    brakes = make_brakes(refusals_max=2)
    setbacks = Setbacks(REQUEST, brakes)
    refusals = [Overloaded(f"full {number}") for number in range(3)]
    for number in (0, 1):
        setbacks.on_refusal(WorkerId(number), refusals[number], 0.0)
        assert setbacks.last_refusal is refusals[number]
    with pytest.raises(Overloaded, match="full 2"):
        setbacks.on_refusal(WorkerId(2), refusals[2], 0.0)
    assert setbacks.avoided == {0, 1, 2}
    assert setbacks.migrations == 0
    assert brakes.metrics.refusals._value.get() == 3


def test_moves_wait_for_their_turn_and_refusals_need_the_budget():
    brakes = make_brakes(MigrationConfig(jitter_s=0.0, at_once=2, spread_s=1.0), burst=1, per_s=0.5)
    waits = [Setbacks(REQUEST, brakes).migrate(LOST, 0.0, 0) for _ in range(4)]
    assert waits == [0.0, 0.0, 0.5, 1.0]
    Setbacks(REQUEST, brakes).on_refusal(WorkerId(1), Overloaded("full"), 0.0)
    with pytest.raises(Overloaded, match="full"):
        Setbacks(REQUEST, brakes).on_refusal(WorkerId(1), Overloaded("full"), 0.0)
    brakes.check()
