"""A follower's process: joins the leader, runs the engine's processes of this node, and ends with the leader's process."""

import asyncio
import os
import random
import threading
from typing import Any

from penstock.core.errors import PenstockError, Unavailable
from penstock.deploy.drain import worker_drain_s
from penstock.deploy.messages import Assignment, Failed, FollowerJob, Phase, Ready, Tell
from penstock.deploy.nodes.follower import NodeFollower
from penstock.deploy.nodes.messages import JOIN_S
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.deploy.processes.nodes.arguments import common_arguments
from penstock.deploy.processes.report import report_of
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.registry import engine_kind
from penstock.engine.spec import EngineSpec, NodeGroup
from penstock.graph import Graph
from penstock.runtime.handshake import Identity
from penstock.runtime.tls import PlaneTls

_EXIT_FAILED = 1


async def run_follower(assignment: Assignment, job: FollowerJob, stopping: asyncio.Event, tell: Tell) -> None:
    """Follow until the leader ends. After `stopping`, wait until the leader has drained. Both end this process.

    Raises:
        Unavailable: the leader did not admit this node in time.
        ConfigError: the leader has another graph, or the engine refuses a setting.
    """
    common = assignment.common
    graph = Graph.model_validate_json(common.graph_json)
    checkpoint = Checkpoint.open(job.model_dir)
    assert graph.runtime.leader is not None, "checked by the supervisor"
    follower = NodeFollower(
        graph.runtime.leader,
        Identity(process=assignment.name, hash_key=common.hash_key, secret=common.secret),
        rank=job.rank,
        arguments=common_arguments(graph, job.role, checkpoint),
        tls=PlaneTls.of(graph.runtime.tls),
    )
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(stopping.wait())
        gathering = group.create_task(_gather(follower, graph, tell))
        await asyncio.wait({leaving, gathering}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            gathering.cancel()
            follower.close("the node is shutting down")
            return
        port = gathering.result()
        running = _start_engine(graph, job, _spec(graph, job, checkpoint, follower, port), tell)
        ends: set[asyncio.Future[Any]] = {running, follower.ended}
        await asyncio.wait({*ends, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not any(end.done() for end in ends):
            follower.leave()  # the leader's worker drains first
            await asyncio.wait(ends, timeout=worker_drain_s(graph), return_when=asyncio.FIRST_COMPLETED)
        error = running.exception() if running.done() else None
        if not leaving.done():
            tell(Failed(message=follower.ended.result(), outside=True) if error is None else report_of(error))
        # The engine may be blocked in a call that waits for other nodes; the supervisor kills its processes.
        os._exit(0 if leaving.done() else _EXIT_FAILED)


async def _gather(follower: NodeFollower, graph: Graph, tell: Tell) -> int:
    """Join, and wait for the other nodes; give the engine's `master_port`."""
    tell(Phase(what=f"joins node 0 at {graph.runtime.leader}"))
    await follower.join(min(JOIN_S, graph.supervision.start_timeout_s), random.Random())
    tell(Phase(what="has joined; waits for the other nodes"))
    port = await follower.start()
    tell(Phase(what="starts the engine's processes"))
    return port


def _spec(
    graph: Graph, job: FollowerJob, checkpoint: Checkpoint, follower: NodeFollower, port: int
) -> EngineSpec:
    role = graph.roles.present()[job.role]
    nodes = NodeGroup(
        size=role.nodes,
        rank=job.rank,
        master_addr=follower.leader_address,
        master_port=port,
        address=follower.own_address,
    )
    return engine_spec(graph, role, checkpoint, device_index=job.device, nodes=nodes)


def _start_engine(graph: Graph, job: FollowerJob, spec: EngineSpec, tell: Tell) -> asyncio.Future[None]:
    """Run the engine's processes in a thread, which blocks until they end; the future has the error."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    role = graph.roles.present()[job.role]
    follow = engine_kind(role.engine).follow
    assert follow is not None, "checked with the graph"

    def ready() -> None:
        loop.call_soon_threadsafe(tell, Ready(detail=f"{role.engine}  node {job.rank} of {role.nodes}"))

    def run() -> None:
        error: BaseException = Unavailable("the engine's processes of this node have ended; its log says why")
        try:
            follow(spec, ready)
        except (Exception, SystemExit) as failed:  # noqa: BLE001 - every error ends this process
            error = failed if isinstance(failed, PenstockError) else Unavailable(f"{role.engine}: {failed!r}")
        loop.call_soon_threadsafe(ended.set_exception, error)

    threading.Thread(target=run, daemon=True, name="engine").start()
    return ended
