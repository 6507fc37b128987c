"""When a server gets no requests, and when it does again."""

from penstock.engine.openai.config import HealthConfig
from penstock.engine.openai.health.breaker import Breaker

CONFIG = HealthConfig(interval_s=1.0, failures_max=3, retry_s_max=5.0)


def failed_once(at_once: bool = True) -> Breaker:
    breaker = Breaker(CONFIG)
    breaker.check_failed("refused", at_once=at_once)
    return breaker


def test_good_checks_do_not_excuse_failed_requests():
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.request_failed("garbage")
        if not breaker.is_open:
            breaker.check_succeeded()
    assert breaker.is_open


def test_failed_checks_in_a_row_open_it_and_some_reasons_at_once():
    breaker = Breaker(CONFIG)
    for _ in range(2):
        breaker.check_failed("silent")
    breaker.check_succeeded()
    breaker.check_failed("silent")
    assert not breaker.is_open
    assert failed_once().problem == "refused"


def test_trials_come_ever_more_slowly_until_one_succeeds():
    breaker = failed_once()
    delays = []
    for _ in range(5):
        delays.append(breaker.delay_s)
        breaker.check_failed("still refused")
    assert delays == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert breaker.problem == "still refused"
    breaker.check_succeeded()
    assert (breaker.is_open, breaker.delay_s) == (False, 1.0)
    breaker.check_failed("silent")
    assert not breaker.is_open, "it counts anew"
