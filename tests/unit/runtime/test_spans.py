"""Spans are recorded only where a process has a recorder and a request has a trace, and refer to each other."""

import pytest

from penstock.core.types.requests import TraceContext
from penstock.runtime import spans

PARENT = TraceContext(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


class Recorder:
    def __init__(self):
        self.ended = []

    def begin(self, name, parent, at_s, *, is_server=False):
        return None if name == "unsampled" else Recorded(self, name, parent, at_s)


class Recorded:
    def __init__(self, recorder, name, parent, began_s):
        self.trace = TraceContext(traceparent=f"00-of-{name}")
        self._of = (recorder, name, parent, began_s)

    def end(self, at_s, attributes, *, error=""):
        recorder, name, parent, began_s = self._of
        recorder.ended.append((name, parent, began_s, at_s, dict(attributes), error))


@pytest.fixture
def recorder():
    found = Recorder()
    spans.install(found)
    yield found
    spans.install(None)


def test_without_a_recorder_nothing_is_begun():
    assert not spans.is_recording()
    assert spans.begin("a", PARENT, 1.0) is None
    assert spans.record("a", PARENT, 1.0, 2.0, {}) is None


def test_a_span_is_the_parent_of_those_within_it(recorder):
    inner = spans.record("outer", PARENT, 1.0, 4.0, {"n": 3}, error="late")
    spans.record("inner", inner, 2.0, 3.0, {})
    assert recorder.ended == [
        ("outer", PARENT, 1.0, 4.0, {"n": 3}, "late"),
        ("inner", TraceContext(traceparent="00-of-outer"), 2.0, 3.0, {}, ""),
    ]


def test_only_a_servers_span_begins_a_trace_and_the_unsampled_have_no_spans(recorder):
    assert spans.record("inner", None, 1.0, 2.0, {}) is None
    assert spans.begin("server", None, 1.0, is_server=True) is not None
    assert spans.record("unsampled", PARENT, 1.0, 2.0, {}) is None
    assert recorder.ended == []
