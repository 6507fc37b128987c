"""The leader's part in the worker process: gathers the followers before the engine starts, and ends with any of them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import Role
from penstock.deploy.messages import Failed, Phase, Tell
from penstock.deploy.nodes.leader import NodeLeader
from penstock.deploy.nodes.messages import JOIN_S
from penstock.deploy.processes.nodes.arguments import common_arguments
from penstock.engine.launch import ThisHost
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.spec import NodeGroup
from penstock.graph import Graph
from penstock.runtime.handshake import Identity
from penstock.runtime.tls import PlaneTls

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
        tell(Phase(what=f"waits for {size - 1} more node{'s' if size > 2 else ''} at {leader.address}"))
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
