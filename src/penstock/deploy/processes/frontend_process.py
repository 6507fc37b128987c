"""The frontend process: HTTP, preprocessing, routing; imports no engine and no torch."""

import asyncio
import gc
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock import __version__
from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError
from penstock.core.types.requests import TraceContext
from penstock.deploy.identity import location_here
from penstock.deploy.messages import Assignment, FrontendJob, Ready, RoundCounts, Tell
from penstock.deploy.planes import Planes
from penstock.deploy.processes.control import Control
from penstock.deploy.processes.supervisor_client import SupervisorClient
from penstock.frontend.apis.responses_store import SharedResponses
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.server import FrontendServer
from penstock.frontend.limits.tenants import ApiAccess, TenantKeys, share_limits
from penstock.graph import Graph
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.runtime import spans
from penstock.runtime.config import TracingConfig
from penstock.runtime.handshake import Identity
from penstock.runtime.observations import RequestRecorder, RequestWindow

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


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class PlannerMetrics:
    """Metrics of one deployment's planner. One event loop owns them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(noun: str, text: str, *labels: str) -> Gauge:
            return Gauge(
                f"penstock_planner_{noun}",
                text,
                labels,
                registry=registry,
                multiprocess_mode="livemostrecent",  # of several frontends, one is told
            )

        self._rounds = Counter(
            "penstock_planner_rounds",
            "Rounds by what came of them: changed, kept, held, refused, dry_run, blind, failed.",
            ["outcome"],
            registry=registry,
        )
        self._changes = Counter(
            "penstock_planner_changes",
            "Workers that the planner began to add, retire or flip.",
            ["change"],
            registry=registry,
        )
        self._seconds = Histogram(
            "penstock_planner_round_seconds", "Time of a round.", buckets=_SECONDS, registry=registry
        )
        self._lost = Counter(
            "penstock_planner_lost_log_lines", "Rounds that the log could not keep.", registry=registry
        )
        self._refused = Counter(
            "penstock_planner_refused_hosts",
            "Connections of hosts that the planner refused, such as one with another secret; its log says why.",
            registry=registry,
        )
        self._wanted = gauge("wanted_workers", "Workers that the planner aims at.", "role")
        self._have = gauge("workers", "Workers that serve, or start in time.", "role")
        self._forecast = gauge("forecast", "Mean that is expected of a series of the demand.", "series")
        self._high = gauge("forecast_high", "Upper edge of that expectation, for which is planned.", "series")
        self._error = gauge("forecast_error", "Mean absolute error of the forecast of late.", "series")
        self._watts = gauge("gpu_watts", "What the GPUs of a role's workers draw, by NVML.", "role")
        self._utilization = gauge(
            "gpu_utilization", "Mean share of the time in which they compute, 0 to 1.", "role"
        )
        self._shortfall = gauge("shortfall", "1 if the SLO is not expected to hold with what may run.")

    def take(self, planned: RoundCounts) -> None:
        """Count a round."""
        self._rounds.labels(planned.outcome).inc()
        self._seconds.observe(planned.seconds)
        self._lost.inc(planned.lost)
        self._refused.inc(planned.refused_hosts)
        for change, count in planned.changes.items():
            self._changes.labels(change).inc(count)
        if planned.outcome == "failed":
            return
        for role, count in planned.have.items():
            self._have.labels(role).set(count)
        for role, count in planned.wanted.items():
            self._wanted.labels(role).set(count)
        for role, watts in planned.gpu_watts.items():
            self._watts.labels(role).set(watts)
        for role, share in planned.gpu_utilization.items():
            self._utilization.labels(role).set(share)
        for each in planned.expected:
            self._forecast.labels(each.series).set(each.mean)
            self._high.labels(each.series).set(each.high)
            if each.mean_error is not None:
                self._error.labels(each.series).set(each.mean_error)
        self._shortfall.set(planned.has_shortfall)


GC_THRESHOLDS = (10_000, 20, 20)
"""Python's own first threshold of 700 objects has the collector look at the objects of all requests in flight every second request: 4 % of
the CPU time."""


def process_failures(registry: CollectorRegistry) -> Counter:
    """Make the counter of the deployment's processes that failed."""
    return Counter(
        "penstock_deploy_process_failures",
        "Processes of the deployment that ended by themselves or were killed as unresponsive, by reason.",
        ["process", "reason"],
        registry=registry,
    )


async def run_frontend(
    assignment: Assignment, job: FrontendJob, stopping: asyncio.Event, tell: Tell, control: Control
) -> None:
    """Serve until `stopping`, then finish requests in flight; a second SIGTERM ends these with an error.

    Raises:
        ConfigError: the port cannot be listened on.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    common = assignment.common
    graph = Graph.model_validate_json(common.graph_json)
    config = graph.frontend.model_copy(update={"host": job.host, "port": job.port})
    identity = Identity(process=assignment.name, hash_key=common.hash_key, secret=common.secret)
    registry = CollectorRegistry()
    failures = process_failures(registry)
    control.on_process_failed = lambda failure: failures.labels(failure.name, failure.reason).inc(
        failure.count
    )
    if graph.planner is not None:
        control.on_planned = PlannerMetrics(registry).take
    rng = random.Random()
    planes = Planes(graph, common, identity, rng=rng, registry=registry)
    location = location_here(graph.router.location)
    dispatcher = Dispatcher(
        planes.discovery,
        planes.requests,
        rng=rng,
        config=graph.router.model_copy(update={"location": location}),
        hash_key=common.hash_key,
        registry=registry,
    )
    for region in graph.regions:
        here = f"@{location.host}" if graph.runtime.spans_hosts else ""
        dispatcher.expect_link(f"link-{region.name}{here}", region.name, len(region.urls))
    tenants = TenantKeys.read(config.api_key_file, secret=common.hash_key)
    access = ApiAccess(tenants=tenants, admin_token=common.admin_token)
    frontend = Frontend(
        config,
        dispatcher,
        hash_key=common.hash_key,
        access=access,
        registry=registry,
        rng=rng,
        region=location.region,
        responses=SharedResponses(Path(common.runtime_dir) / "responses", assignment.name)
        if job.metrics_dir
        else None,
    )
    async with tracing(graph.tracing, "penstock-frontend", assignment.name), planes, dispatcher:
        # Frontends share the port: one that listens before it knows a worker would refuse requests that others could serve.
        await _unless(stopping, dispatcher.looked(), timeout_s=graph.router.connect_timeout_s)
        server = FrontendServer(
            frontend,
            share_port=True,
            supervisor=SupervisorClient(Path(common.runtime_dir), graph.slo),
        )
        await server.start()
        try:
            if await _unless(stopping, dispatcher.serving()):
                tell(Ready(detail=", ".join(dispatcher.models())))
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(_observe(frontend, dispatcher, control)),
                        group.create_task(server.watch()),
                        group.create_task(share_limits(tenants, dispatcher.count_tenants)),
                    ]
                    await stopping.wait()
                    for task in tasks:
                        task.cancel()
        finally:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.hurry)
            await server.close()


async def _observe(frontend: Frontend, dispatcher: Dispatcher, control: Control) -> None:
    recorder = frontend.metrics.recorder = RequestRecorder()

    def take() -> RequestWindow:
        queued, oldest_s = dispatcher.queued()
        return recorder.take(queued=queued, oldest_queued_s=oldest_s)

    await control.observe(take)


async def _unless(
    stopping: asyncio.Event, waiting: Coroutine[Any, Any, object], *, timeout_s: float | None = None
) -> bool:
    """Wait at most `timeout_s` seconds; False if `stopping` was set first."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(waiting), group.create_task(stopping.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
        for task in tasks:
            task.cancel()
    return not stopping.is_set()
