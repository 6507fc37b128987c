"""The processes of a worker over several nodes: a follower's, and the group as the leader's worker has it."""

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.core.errors import ConfigError, PenstockError, Unavailable
from penstock.core.types.instances import Role
from penstock.deploy.card import worker_drain_s
from penstock.deploy.messages import Assignment, Failed, FollowerJob, Ready, StartPhase, Tell, report_of
from penstock.deploy.nodes import JOIN_S, NodeFollower, NodeLeader
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.engine.launch import SymbolicHost, ThisHost
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.registry import describe_launch, engine_kind
from penstock.engine.spec import EngineSpec, NodeGroup
from penstock.graph import Graph
from penstock.runtime.handshake import Identity
from penstock.runtime.tls import PlaneTls

_OF_ONE_NODE = {"model", "model_path"}
"""Nodes may have the model's files at different paths."""


def common_arguments(graph: Graph, role: Role, checkpoint: Checkpoint) -> dict[str, Any]:
    """Give the arguments by name, as plain JSON values.

    Raises:
        ConfigError: the engine cannot have a setting.
    """
    spec = graph.roles.present()[role]
    launch = describe_launch(spec.engine, engine_spec(graph, spec, checkpoint), SymbolicHost())
    shared = {name: value for name, value in launch.arguments.items() if name not in _OF_ONE_NODE}
    return msgspec.json.decode(msgspec.json.encode(shared), type=dict[str, Any])


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
    tell(StartPhase(what=f"joins node 0 at {graph.runtime.leader}"))
    await follower.join(min(JOIN_S, graph.supervision.start_timeout_s), random.Random())
    tell(StartPhase(what="has joined; waits for the other nodes"))
    port = await follower.start()
    tell(StartPhase(what="starts the engine's processes"))
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


_EXIT_LOST = 1


@dataclass(frozen=True, slots=True)
class GatheredNodes:
    """All nodes of a worker, joined.

    Attributes:
        nodes: what the engine is told of them; None for a worker on one node.
    """

    nodes: NodeGroup | None
    _leader: NodeLeader | None
    _tell: Tell

    async def watch(self, drain: Callable[[], None]) -> None:
        """Call `drain` when a follower is shutting down; end this process at once when a follower is lost.

        The engine may be blocked for minutes in a call that waits for the lost node. When this process ends, routers see its
        connections close, and move its requests to other workers.
        """
        if self._leader is None:
            return
        ends: set[asyncio.Future[Any]] = {self._leader.lost, self._leader.leaving}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not self._leader.lost.done():
            drain()
            await asyncio.wait({self._leader.lost})
        self._tell(Failed(message=self._leader.lost.result(), outside=True))
        os._exit(_EXIT_LOST)

    def check_left(self) -> None:
        """Raise if the worker has drained because a follower is shutting down.

        Raises:
            Unavailable: it has.
        """
        if self._leader is not None and self._leader.leaving.done():
            raise Unavailable(
                "a node of this worker is shutting down; the worker has drained, and gathers its nodes again"
            )


@asynccontextmanager
async def gather_nodes(
    graph: Graph, name: Role, checkpoint: Checkpoint, identity: Identity, tell: Tell
) -> AsyncIterator[GatheredNodes]:
    """Wait until all followers of a worker of role `name` have joined; leaving the context ends them.

    Raises:
        ConfigError: the leader's address is not of this host.
        Unavailable: a follower did not join in time, or was lost again.
    """
    role = graph.roles.present().get(name)  # None: a link to another region
    size = 1 if role is None else role.nodes
    if size == 1:
        yield GatheredNodes(None, None, tell)
        return
    assert graph.runtime.leader is not None, "checked by the supervisor"
    leader = NodeLeader(
        graph.runtime.leader,
        identity,
        nodes=size,
        arguments=common_arguments(graph, name, checkpoint),
        tls=PlaneTls.of(graph.runtime.tls),
    )
    async with leader:
        tell(StartPhase(what=f"waits for {size - 1} more node{'s' if size > 2 else ''} at {leader.address}"))
        await leader.gather(min(JOIN_S, graph.supervision.start_timeout_s))
        host = ThisHost()
        port, *_ = host.ports(
            "port where the engine's processes of all nodes meet", address=leader.address.host
        )
        address = await _own_address(leader.address.host)
        nodes = NodeGroup(size=size, rank=0, master_addr=address, master_port=port, address=address)
        leader.start(int(port))
        yield GatheredNodes(nodes, leader, tell)


async def _own_address(host: str) -> str:
    """Resolve the leader's name: engines bind its IP address."""
    found = await asyncio.get_running_loop().getaddrinfo(host, 1)
    if not found:
        raise ConfigError(f"runtime.leader: {host}: has no address; give one of this host")
    return str(found[0][4][0])
