"""What several rooms of the router's tests need."""

import io
from collections.abc import Callable, Iterator

import pytest
import structlog

from penstock.core import log


@pytest.fixture
def decision_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Log everything as JSON; give the lines of decisions so far."""
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "json")
    stream = io.StringIO()
    log.configure("debug", process="test", stream=stream)
    yield lambda: [line for line in stream.getvalue().splitlines() if "request_routed" in line]
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
