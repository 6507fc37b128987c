"""Gauges of the sessions that workers keep."""

from prometheus_client import CollectorRegistry

from penstock.core.types.load import SessionCounts
from penstock.router.metrics import RouterMetrics

COUNTS = SessionCounts(
    open=2, pinned_blocks=7, pinned_blocks_max=8, opened=9, closed=3, expired=2, displaced=1, yielded=1
)


def shown(registry, noun, worker="worker-1", **labels):
    return registry.get_sample_value(f"penstock_router_{noun}", {"worker": worker, **labels})


def test_what_a_worker_reports_is_shown():
    registry = CollectorRegistry()
    RouterMetrics(registry).sessions.show("worker-1", COUNTS)
    assert (shown(registry, "sessions"), shown(registry, "sessions_opened")) == (2, 9)
    assert (shown(registry, "session_pinned_blocks"), shown(registry, "session_pinned_blocks_max")) == (7, 8)
    ends = {
        reason: shown(registry, "session_ends", reason=reason) for reason in ("closed", "expired", "cleared")
    }
    assert ends == {"closed": 3, "expired": 2, "cleared": 0}


def test_series_end_with_their_worker(monkeypatch):
    registry = CollectorRegistry()
    sessions = RouterMetrics(registry).sessions
    sessions.show("worker-1", None)
    assert shown(registry, "sessions") is None
    sessions.show("worker-1", COUNTS)
    sessions.show("worker-2", COUNTS)
    sessions.forget("worker-1")
    sessions.forget("worker-3")
    assert shown(registry, "sessions") is None
    assert shown(registry, "session_ends", reason="closed") is None
    assert shown(registry, "sessions", worker="worker-2") == 2
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "anywhere")
    sessions.forget("worker-2")
    assert (
        shown(registry, "sessions", worker="worker-2"),
        shown(registry, "session_ends", "worker-2", reason="closed"),
    ) == (0, 0)
