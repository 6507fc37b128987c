"""W3C trace context: what is passed on, and what is left out."""

import pytest

from penstock.core.types.trace import TraceContext
from penstock.frontend.limits.trace_context import read_trace, sound_request_id

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_trace_is_passed_on_as_it_came() -> None:
    headers = {"traceparent": PARENT, "tracestate": "a=1,b=2", "X-Request-Id": "r 1"}
    trace = read_trace(headers)
    assert trace == TraceContext(request_id="r 1", traceparent=PARENT, tracestate="a=1,b=2")
    assert trace.headers() == headers
    assert trace.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert read_trace({}) is None
    only = read_trace({"X-Request-Id": "r"})
    assert only == TraceContext(request_id="r")
    assert only.headers() == {"X-Request-Id": "r"}
    assert only.trace_id == ""
    later = f"01{PARENT[2:]}-more"
    assert read_trace({"traceparent": later}) == TraceContext(traceparent=later), "of a version to come"


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT[:-1],
        f"{PARENT}-more",
        f"ff{PARENT[2:]}",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        f"01{PARENT[2:]}-{'x' * 600}",
        f"01{PARENT[2:]}-\x01",
        PARENT.replace("-", "_"),
    ],
)
def test_what_is_malformed_is_left_out(parent: str) -> None:
    assert read_trace({"traceparent": parent, "tracestate": "a=1"}) is None
    assert read_trace({"traceparent": parent, "X-Request-Id": "r"}) == TraceContext(request_id="r")


def test_ids_and_states_that_could_break_a_line_are_left_out() -> None:
    for wrong in ("", "a\nb", "é", "x" * 129, "\x00"):
        assert sound_request_id({"X-Request-Id": wrong}) == ""
    for wrong in ("x" * 513, "a=é", "a\tb"):
        assert read_trace({"traceparent": PARENT, "tracestate": wrong}) == TraceContext(traceparent=PARENT)
