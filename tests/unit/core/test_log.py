import pytest
import structlog

from penstock.core.log import WARNINGS_PER_MINUTE, WarningLimit


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def printed(limit, event, times, method="warning"):
    lines = []
    for number in range(times):
        try:
            lines.append(limit(None, method, {"event": event, "number": number}))
        except structlog.DropEvent:
            continue
    return lines


def test_warnings_over_the_limit_are_counted_on_the_next_one():
    clock = Clock()
    limit = WarningLimit(clock)
    assert [line["number"] for line in printed(limit, "peer_refused", 1000)] == list(
        range(WARNINGS_PER_MINUTE)
    )
    clock.now_s += 59.9
    assert printed(limit, "peer_refused", 1) == []
    clock.now_s += 0.1
    first, second = printed(limit, "peer_refused", 2)
    assert first == {"event": "peer_refused", "number": 0, "suppressed": 1000 - WARNINGS_PER_MINUTE + 1}
    assert second == {"event": "peer_refused", "number": 1}


def test_each_event_has_a_limit_of_its_own():
    limit = WarningLimit(Clock())
    printed(limit, "peer_refused", 1000)
    assert len(printed(limit, "worker_lost", 10)) == 10


@pytest.mark.parametrize("method", ["info", "error", "debug"])
def test_only_warnings_are_limited(method):
    assert len(printed(WarningLimit(Clock()), "request_failed", 1000, method)) == 1000
