"""OpenTelemetry: spans go to a collector by OTLP, in batches, from a thread of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from penstock import __version__
from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError
from penstock.core.types.requests import TraceContext
from penstock.runtime import spans
from penstock.runtime.config import TracingConfig

_TIMEOUT_S = 3.0
"""Longest time for one batch; and for what is left at the end."""


class OpenTelemetry:
    """A `runtime.spans.SpanRecorder` by OpenTelemetry's SDK. One event loop owns it, and gives its times."""

    def __init__(self, config: TracingConfig, service: str, process: str) -> None:
        """Start the exporter's thread.

        Raises:
            ConfigError: the extra `otel` is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased  # noqa: PLC0415
            from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415
            from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
                TraceContextTextMapPropagator,
            )
        except ImportError as error:
            raise ConfigError(
                f"tracing: {error.name or error} is not installed; pip install 'penstock-llm[otel]', or leave tracing out"
            ) from error
        resource = Resource.create(
            {"service.name": service, "service.version": __version__, "service.instance.id": process}
        )
        self._provider = TracerProvider(
            resource=resource, sampler=ParentBased(TraceIdRatioBased(config.sample_share))
        )
        exporter = OTLPSpanExporter(endpoint=f"{config.endpoint.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("penstock", __version__)
        self.propagator = TraceContextTextMapPropagator()
        self.kinds = (SpanKind.INTERNAL, SpanKind.SERVER)
        self.failed: Callable[[str], Any] = lambda why: Status(StatusCode.ERROR, why)
        self._offset_s = wall_time_s() - asyncio.get_running_loop().time()

    def begin(
        self, name: str, parent: TraceContext | None, at_s: float, *, is_server: bool = False
    ) -> "RecordedSpan | None":
        """Begin a span; None where its trace is not sampled."""
        context = None if parent is None else self.propagator.extract(parent.headers())
        span = self.tracer.start_span(
            name, context=context, kind=self.kinds[is_server], start_time=self.nanoseconds(at_s)
        )
        return RecordedSpan(self, span) if span.is_recording() else None

    def nanoseconds(self, loop_s: float) -> int:
        """Convert a loop time to nanoseconds since the epoch."""
        return int((loop_s + self._offset_s) * 1e9)

    def close(self) -> None:
        """Send what is left, and end the thread; gives up after some seconds."""
        self._provider.force_flush(int(_TIMEOUT_S * 1e3))
        self._provider.shutdown()


class RecordedSpan:
    """A span of OpenTelemetry's SDK."""

    def __init__(self, recorder: OpenTelemetry, span: Any) -> None:
        self._recorder = recorder
        self._span = span

    @property
    def trace(self) -> TraceContext:
        """What spans within it have as their parent."""
        context = self._span.get_span_context()
        return TraceContext(
            traceparent=f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        )

    def end(self, at_s: float, attributes: spans.Attributes, *, error: str = "") -> None:
        """End it; `error` says why it failed."""
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(self._recorder.failed(error))
        self._span.end(end_time=self._recorder.nanoseconds(at_s))


@asynccontextmanager
async def tracing(config: TracingConfig | None, service: str, process: str) -> AsyncIterator[None]:
    """Record this process's spans within the block, if the graph says where they go.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """
    if config is None:
        yield
        return
    recorder = OpenTelemetry(config, service, process)
    spans.install(recorder)
    try:
        yield
    finally:
        spans.install(None)
        await asyncio.to_thread(recorder.close)
