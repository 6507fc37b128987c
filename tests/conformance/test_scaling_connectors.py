"""Every connector that scales a deployment, and the control channel before them."""

import random
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.core.types.instances import Role
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME, RunningDeployment
from penstock.deploy.control.server import ControlServer
from penstock.deploy.hosts.connector import HostsConnector
from penstock.planner.memory_connector import MemoryConnector, TimedChanges
from penstock.planner.observation import ObservationStream
from penstock.sim.chaos_trial import Trial, small_spec
from penstock.sim.cluster import SimCluster
from penstock.sim.loop import SimLoop
from penstock.sim.scaling import ScaledCluster
from penstock.testing.scaling_connector import ScalingConnectorSuite
from tests.support.linked_hosts import linked, pool_of
from tests.support.pods_of_roles import pods_of_roles
from tests.support.scripted_pool import PoolScene

QUICK = TimedChanges(starts_s=0.01, drains_s=0.3, flips_s=0.01)


class TestMemoryConnector(ScalingConnectorSuite):
    loop_factory = SimLoop

    @asynccontextmanager
    async def make(self, replicas):
        connector = MemoryConnector(replicas)
        yield connector
        await connector.close()


class TestSimulatedCluster(ScalingConnectorSuite):
    loop_factory = SimLoop

    @asynccontextmanager
    async def make(self, replicas):
        spec = small_spec(Trial(prefill_workers=replicas.get(Role.PREFILL, 0)))
        async with (
            SimCluster(spec, random.Random(1)) as cluster,
            ScaledCluster(cluster, replicas, start_s=5.0, workers_max=64) as scaled,
        ):
            yield scaled.connector


class TestWorkerPool(ScalingConnectorSuite):
    loop_factory = SimLoop

    @asynccontextmanager
    async def make(self, replicas):
        roles = {role.value: {"engine": "mock", "replicas": count} for role, count in replicas.items()}
        async with PoolScene(roles).running() as pool:
            yield pool


@asynccontextmanager
async def by_socket(connector):
    """Put the control channel before a connector."""
    with tempfile.TemporaryDirectory() as directory:
        me = RunningDeployment(name="suite", url="http://127.0.0.1:1", pid=1)
        async with ControlServer(connector, ObservationStream(), Path(directory), me):
            client = LocalConnector(Path(directory, SOCKET_NAME))
            yield client
            await client.close()


class TestLocalConnector(ScalingConnectorSuite):
    @asynccontextmanager
    async def make(self, replicas):
        connector = MemoryConnector(replicas, changes=QUICK)
        async with by_socket(connector) as client:
            yield client
        await connector.close()


class TestLocalConnectorOfPool(ScalingConnectorSuite):
    @asynccontextmanager
    async def make(self, replicas):
        roles = {role.value: {"engine": "mock", "replicas": count} for role, count in replicas.items()}
        async with PoolScene(roles).running() as pool, by_socket(pool) as client:
            yield client


class TestHostsConnector(ScalingConnectorSuite):
    loop_factory = SimLoop

    @asynccontextmanager
    async def make(self, replicas):
        connector = HostsConnector(settle_s=0.0)
        async with pool_of(replicas) as here, pool_of(dict.fromkeys(replicas, 0)) as there:
            connector.join("a", here, await here.scale())
            connector.join("b", there, await there.scale())
            yield connector


class TestHostsConnectorOfLinkedHosts(ScalingConnectorSuite):
    """All workers of the start are on the host that is connected."""

    @asynccontextmanager
    async def make(self, replicas):
        connector = HostsConnector(settle_s=0.0)
        async with pool_of(dict.fromkeys(replicas, 0)) as here, pool_of(replicas) as there:
            connector.join("a", here, await here.scale())
            async with linked(connector, {"b": there}):
                yield connector


class TestKubernetesConnector(ScalingConnectorSuite):
    @asynccontextmanager
    async def make(self, replicas):
        async with pods_of_roles(replicas) as pods:
            yield pods.connector
