import io
import logging

import pytest
import structlog

from penstock.core import log
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


@pytest.fixture
def unconfigured():
    asyncio_log = logging.getLogger("asyncio")
    handlers, propagates = asyncio_log.handlers, asyncio_log.propagate
    yield
    asyncio_log.handlers, asyncio_log.propagate = handlers, propagates
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_cause_is_one_line_and_its_traceback_for_debugging(unconfigured, level):
    out = io.StringIO()
    log.configure(level, process="worker-1", stream=out)
    try:
        {}["weights\nof layer 3"]
    except KeyError as error:
        log.get_logger().error("engine_died", **log.cause(error))
    first, *more = out.getvalue().splitlines()
    assert "KeyError" in first
    assert "test_log.py:" in first
    assert ("Traceback" in "".join(more)) is (level == "debug")
    assert bool(more) is (level == "debug")


def test_a_cause_need_not_have_been_raised_and_is_not_long():
    assert log.cause(ValueError("x" * 5000)) == {"error": f"ValueError: {'x' * 988}"}


def test_what_asyncio_logs_has_the_form_of_the_other_lines(unconfigured):
    out = io.StringIO()
    log.configure(process="worker-1", stream=out)
    asyncio_log = logging.getLogger("asyncio")
    asyncio_log.warning("returning true from eof_received() has no effect when using ssl")
    asyncio_log.warning("socket.send() raised exception.")
    asyncio_log.error("Task exception was never retrieved\nfuture: ...", exc_info=ValueError("a\nb"))
    warned, failed = out.getvalue().splitlines()
    assert "warning" in warned
    assert "asyncio_reported" in warned
    assert "socket.send() raised exception." in warned
    assert "error" in failed
    assert "Task exception was never retrieved" in failed
    assert "ValueError: a b" in failed
    assert "future: ..." not in failed
