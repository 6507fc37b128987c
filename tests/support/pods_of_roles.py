"""Pods of PenstockRoles, as a cluster with the operator has them: each is a pool by script that joins a planner's connector."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from penstock.core.types.instances import ReplicaState, Role, Scale
from penstock.deploy.hosts.kubernetes_connector import ROLES, KubernetesConnector
from penstock.deploy.operator.definitions import definitions
from penstock.deploy.supervisor.worker_pool import LocalWorkerPool
from penstock.runtime.kubernetes import KubernetesAccess, KubernetesClient, Resource
from tests.support.kubernetes.api_server import ApiServer
from tests.support.scripted_pool import PoolScene

GRAPH = "suite"
_DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", is_namespaced=False
)


class Pods:
    """Makes as many pods of each role as its object says, and ends those that are named first."""

    def __init__(self, server: ApiServer, client: KubernetesClient, connector: KubernetesConnector) -> None:
        self.server, self.client, self.connector = server, client, connector
        self.pods: dict[Role, dict[str, asyncio.Event]] = {}
        self.hosts: dict[str, LocalWorkerPool] = {}
        """The workers of each pod so far, by its name."""
        self.is_stateful = False
        self.is_paused = False
        """Nothing starts and nothing ends: who makes the pods is away."""
        self._made = 0

    async def run(self) -> None:
        """Follow the objects until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for role, pods in () if self.is_paused else self.pods.items():
                    spec: dict[str, Any] = (await self.client.get(ROLES, f"{GRAPH}-{role}"))["spec"]
                    while len(pods) < spec["replicas"]:
                        name = f"{GRAPH}-{role}-{len(pods) if self.is_stateful else f'x-{self._made}'}"
                        self._made += 1
                        pods[name] = asyncio.Event()
                        group.create_task(self.run_pod(role, name, pods[name]))
                    # A pod from before `is_stateful` was set has no ordinal, and is none of the last.
                    last = sorted(pods, key=lambda name: ("-x-" not in name, name))[::-1]
                    named = (
                        [] if self.is_stateful else [name for name in spec.get("leaving", ()) if name in pods]
                    )
                    for name in [*named, *(each for each in last if each not in named)][
                        : len(pods) - spec["replicas"]
                    ]:
                        pods.pop(name).set()
                await asyncio.sleep(0.01)

    async def run_pod(self, role: Role, name: str, ends: asyncio.Event) -> None:
        """Be a pod until it `ends`."""
        roles = {each.value: {"engine": "mock", "replicas": int(each is role)} for each in self.pods}
        scene = PoolScene(roles)
        scene.pool.define({role: scene.pool._roles[role]})  # what --run leaves
        async with scene.running() as pool:
            self.hosts[name] = pool
            self.connector.join(name, pool, await pool.scale())
            await ends.wait()
        self.connector.leave(name, on_purpose=True)

    def pod_of(self, role: Role, worker: str) -> str:
        """Give the pod of a worker."""
        return next(name for name in self.pods[role] if self.connector.label(name, "") == worker)


@asynccontextmanager
async def pods_of_roles(
    replicas: Mapping[Role, int], *, settle_s: float = 0.0, lost_after_s: float = 15.0
) -> AsyncIterator[Pods]:
    """Run a PenstockGraph's roles with so many pods each."""
    async with ApiServer(tokens=("suite",)) as server:
        access = KubernetesAccess(server.url, namespace="default", token="suite")
        async with KubernetesClient(access, timeout_s=10) as client, asyncio.TaskGroup() as group:
            for definition in definitions():
                await client.create(_DEFINITIONS, definition)
            for role, count in replicas.items():
                await client.create(
                    ROLES,
                    {
                        "apiVersion": ROLES.api_version,
                        "kind": ROLES.kind,
                        "metadata": {"name": f"{GRAPH}-{role}"},
                        "spec": {"graph": GRAPH, "role": role.value, "replicas": count},
                    },
                )
            connector = KubernetesConnector(
                client, GRAPH, replicas, settle_s=settle_s, lost_after_s=lost_after_s, hold_s=60.0
            )
            pods = Pods(server, client, connector)
            pods.pods = {role: {} for role in replicas}
            running = group.create_task(pods.run())
            while not _are_ready(await connector.scale(), sum(replicas.values())):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
            yield pods
            running.cancel()


def _are_ready(scale: Scale, count: int) -> bool:
    return [replica.state for replica in scale.replicas] == [ReplicaState.READY] * count
