"""The frontend process: HTTP, preprocessing, routing; imports no engine and no torch."""

import asyncio
import gc
import random
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from penstock.deploy.location import location_here
from penstock.deploy.messages import Assignment, FrontendJob, Ready, Tell
from penstock.deploy.planes import Planes
from penstock.deploy.processes.control import Control
from penstock.deploy.processes.planner_metrics import PlannerMetrics
from penstock.deploy.processes.supervisor_client import SupervisorClient
from penstock.deploy.processes.tracing import tracing
from penstock.frontend.apis.responses_store import SharedResponses
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.server import FrontendServer
from penstock.frontend.limits.tenants import ApiAccess, TenantKeys, share_limits
from penstock.graph import Graph
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.runtime.handshake import Identity
from penstock.runtime.observations import RequestRecorder, RequestWindow

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
