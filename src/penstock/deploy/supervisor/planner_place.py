"""Where the planner of a deployment is, as seen from one host: here for this host alone, here for several hosts, or elsewhere."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from penstock.core.types.instances import Location
from penstock.deploy.hosts.connector import HostsConnector
from penstock.deploy.hosts.host_link import HostLink
from penstock.deploy.hosts.kubernetes_connector import KubernetesConnector
from penstock.deploy.hosts.planner_server import PlannerServer
from penstock.deploy.location import location_here
from penstock.deploy.messages import Common, Planned
from penstock.deploy.supervisor.frontends.frontends import Frontends
from penstock.deploy.supervisor.scaling.worker_pool import WorkerPool
from penstock.graph import Graph
from penstock.planner.observe.stream import ObservationStream
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes import KubernetesAccess, KubernetesClient
from penstock.runtime.observations import Window
from penstock.runtime.tls import PlaneTls
from penstock.seams import ScalingConnector

_CALL_S = 10.0
"""Longest call of the API of Kubernetes."""


@dataclass(slots=True)
class PlannerPlace:
    """What a host's planner scales and sees, and where this host's windows go beside its own stream.

    Attributes:
        connector: changes the workers of all hosts that the planner scales.
        observations: what their processes see.
    """

    connector: ScalingConnector
    observations: ObservationStream
    _frontends: Frontends
    _host: str = ""
    _server: PlannerServer | None = None
    _link: HostLink | None = None

    def window(self, process: str, window: Window) -> None:
        """Take a window of a process of this host."""
        if self._link is not None:
            self._link.window(process, window)
        elif self._server is not None:
            self.observations.put(f"{process}@{self._host}", window)

    def expect(self, process: str) -> None:
        """Note that a process of this host is ready."""
        if self._server is not None:
            self.observations.expect(f"{process}@{self._host}")

    def forget(self, process: str) -> None:
        """Note that a process of this host has ended for good."""
        if self._server is not None:
            self.observations.forget(f"{process}@{self._host}")

    def tell(self, planned: Planned) -> None:
        """Send a round to one frontend, of this host if it has any."""
        if self._server is None:
            self._frontends.tell_planned(planned)
        elif self._frontends.count:
            self._frontends.tell_planned(self._server.with_refused(planned))
        else:
            self._server.tell(planned)


@asynccontextmanager
async def planner_place(
    graph: Graph,
    common: Common,
    pool: WorkerPool,
    frontends: Frontends,
    observations: ObservationStream,
    *,
    has_planner: bool,
) -> AsyncIterator[PlannerPlace]:
    """Listen for other hosts where the planner of several is here, or connect to it where it is elsewhere.

    Raises:
        ConfigError: its address is in use, or not of this host.
    """
    config = graph.planner
    if config is None or config.address is None:
        yield PlannerPlace(pool, observations, frontends)
        return
    identity = Identity(process="supervisor", hash_key=common.hash_key, secret=common.secret)
    name = location_here(Location()).host
    async with AsyncExitStack() as stack:
        tls = PlaneTls.of(graph.runtime.tls)
        if tls is not None:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(group.create_task(tls.watch(), name="certificates").cancel)
        if has_planner:
            seen = ObservationStream()
            connector: HostsConnector | KubernetesConnector
            if config.scales == "pods":
                access = KubernetesAccess.find()
                client = await stack.enter_async_context(KubernetesClient(access, timeout_s=_CALL_S))
                connector = KubernetesConnector(client, graph.name, graph.roles.present())
            else:
                connector = HostsConnector(hold_s=config.act.hold_s)
                connector.join(name, pool, await pool.scale())
            server = await stack.enter_async_context(
                PlannerServer(config.address, identity, connector, seen, tls=tls, own_name=name)
            )
            yield PlannerPlace(connector, seen, frontends, name, server)
            return
        link = HostLink(
            config.address,
            identity,
            name=name,
            host=pool,
            frontends=frontends.ready,
            tell=frontends.tell_planned,
            rng=random.Random(),
            tls=tls,
        )
        yield PlannerPlace(pool, observations, frontends, name, None, await stack.enter_async_context(link))
