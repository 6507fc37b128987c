"""A planner's connector with hosts: their pools in this process, in part by real connections."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from penstock.core.types.instances import Role
from penstock.deploy.hosts.connector import Host, HostsConnector
from penstock.deploy.hosts.host_link import HostLink
from penstock.deploy.hosts.planner_server import PlannerServer
from penstock.deploy.supervisor.worker_pool import LocalWorkerPool
from penstock.planner.observation import ObservationStream
from penstock.runtime.handshake import Identity
from tests.support.scripted_pool import PoolScene

SECRET = b"a secret of all hosts"


def identity(secret: bytes = SECRET) -> Identity:
    return Identity(process="supervisor", secret=secret)


@asynccontextmanager
async def pool_of(replicas: Mapping[Role, int], room: int | None = None) -> AsyncIterator[LocalWorkerPool]:
    """Run a host's workers by script; `room` bounds those of each role."""
    roles = {
        role.value: {"engine": "mock", "replicas": count, "replicas_max": room}
        for role, count in replicas.items()
    }
    async with PoolScene(roles).running() as pool:
        yield pool


def link(server: PlannerServer, name: str, host: Host, *, secret: bytes = SECRET) -> HostLink:
    """Make a host's connection to the planner."""
    return HostLink(
        str(server.address),
        identity(secret),
        name=name,
        host=host,
        frontends=lambda: ("frontend-1",),
        tell=lambda _planned: None,
        rng=random.Random(1),
    )


@asynccontextmanager
async def linked(connector: HostsConnector, hosts: Mapping[str, Host]) -> AsyncIterator[PlannerServer]:
    """Connect hosts to a connector by TCP."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            PlannerServer("tcp://127.0.0.1:0", identity(), connector, ObservationStream(), own_name="a")
        )
        for name, host in hosts.items():
            await stack.enter_async_context(link(server, name, host))
        async with asyncio.timeout(30):
            while set(server.linked) != set(hosts):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        yield server
