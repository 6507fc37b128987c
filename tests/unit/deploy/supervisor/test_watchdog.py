"""Which processes are given up, by the heartbeats between ticks."""

import pytest

from penstock.deploy.messages import ProcessHeartbeat
from penstock.deploy.supervisor.member import Watchdog
from penstock.graph import Supervision

SETTINGS = Supervision(start_timeout_s=30, liveness_timeout_s=4, step_timeout_s=10, close_timeout_s=6)


def ticks_until_killed(watchdog, beat=None, ticks=1000):
    for tick in range(1, ticks + 1):
        if beat is not None:
            watchdog.beat(beat() if callable(beat) else beat)
        if watchdog.tick() is not None:
            return tick, watchdog.verdict.reason
    return None


def ready():
    watchdog = Watchdog(SETTINGS)
    watchdog.ready()
    return watchdog


def test_a_start_has_its_own_allowance_in_which_nothing_need_be_said():
    watchdog = Watchdog(SETTINGS)
    assert watchdog.tick_s == 1.0
    assert ticks_until_killed(watchdog) == (30, "start_timeout")
    assert watchdog.verdict.why == "not ready 30 s after its start"


def test_who_says_nothing_once_ready_is_given_up_and_the_start_does_not_count():
    watchdog = Watchdog(SETTINGS)
    for _ in range(29):
        assert watchdog.tick() is None
    watchdog.ready()
    assert ticks_until_killed(watchdog) == (4, "silent")
    assert watchdog.verdict.why == "killed after 4 s of silence (supervision.liveness_timeout_s)"


def test_an_engine_that_has_requests_finishes_a_step_within_its_allowance():
    assert ticks_until_killed(ready(), ProcessHeartbeat(steps=7, has_requests=True)) == (10, "stuck")
    steps = iter(range(1000))
    assert (
        ticks_until_killed(ready(), lambda: ProcessHeartbeat(steps=next(steps) // 9, has_requests=True), 500)
        is None
    )


@pytest.mark.parametrize("beat", [None, ProcessHeartbeat(), ProcessHeartbeat(steps=7, has_requests=True)])
@pytest.mark.parametrize("make", [ready, lambda: Watchdog(SETTINGS)])
def test_an_engine_closes_within_its_allowance_whatever_else_it_does(make, beat):
    watchdog = make()
    watchdog.closing()
    assert ticks_until_killed(watchdog, beat) == (6, "close_timeout")
    assert (
        watchdog.verdict.why == "killed as its engine did not close within 6 s (supervision.close_timeout_s)"
    )
