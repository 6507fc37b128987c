"""Spans of distributed traces: what took how long of a request. Nothing is recorded until a process installs a recorder."""

from collections.abc import Mapping
from typing import Protocol

from penstock.core.types.requests import TraceContext

Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    """A span that has begun; `trace` goes to whoever works for it."""

    @property
    def trace(self) -> TraceContext: ...

    def end(self, at_s: float, attributes: Attributes, *, error: str = "") -> None:
        """End it at a loop time; `error` says why it failed."""
        ...


class SpanRecorder(Protocol):
    """Keeps spans and sends them somewhere."""

    def begin(
        self, name: str, parent: TraceContext | None, at_s: float, *, is_server: bool = False
    ) -> Span | None:
        """Begin a span at a loop time; None where its trace is not sampled."""
        ...


_recorder: SpanRecorder | None = None


def install(recorder: SpanRecorder | None) -> None:
    """Set the process's recorder; None records nothing."""
    global _recorder  # noqa: PLW0603 - like a log, it belongs to the process
    _recorder = recorder


def is_recording() -> bool:
    """Whether the process records spans."""
    return _recorder is not None


def begin(name: str, parent: TraceContext | None, at_s: float, *, is_server: bool = False) -> Span | None:
    """Begin a span; None where nothing is recorded, or its trace is not sampled.

    Args:
        name: what it is of.
        parent: of its trace; None begins a trace.
        at_s: loop time.
        is_server: it serves a client's request, and may begin a trace.
    """
    if _recorder is None or (parent is None and not is_server):
        return None
    return _recorder.begin(name, parent, at_s, is_server=is_server)


def record(
    name: str,
    parent: TraceContext | None,
    began_s: float,
    ended_s: float,
    attributes: Attributes,
    *,
    error: str = "",
) -> TraceContext | None:
    """Record a whole span, by loop times; gives what spans within it have as their parent, None as `begin` does."""
    span = begin(name, parent, began_s)
    if span is None:
        return None
    span.end(ended_s, attributes, error=error)
    return span.trace
