"""The pods of an InferencePool become servers as they get ready, and go; over the tests' API server, with its faults."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from penstock.frontend.endpoint_picker.pool import PODS, POOLS, PoolServers
from penstock.router.routing_service import RoutingService
from penstock.runtime.kubernetes import KubernetesAccess, KubernetesClient, Pace
from tests.support.kubernetes.api_server import ApiServer

LIMIT_S = 60.0
POOL = {
    "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": "llama"},
    "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}],
             "endpointPickerRef": {"name": "picker", "port": {"number": 9002}}},
}  # fmt: skip


def pod(name: str, ip: str, *, ready: bool = True, app: str = "vllm") -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": app}}, "spec": {"nodeName": "node-1"},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }  # fmt: skip


@dataclass
class Scene:
    client: KubernetesClient
    service: RoutingService

    async def put(self, body: dict[str, Any]) -> None:
        """Create a pod; the API server takes its status by the subresource only."""
        made = await self.client.create(PODS, body)
        await self.client.replace(PODS, {**made, "status": body["status"]}, "status")

    def shown(self) -> dict[str, tuple[str, str]]:
        return {view.name: (view.address, view.condition) for view in self.service.workers()}

    async def becomes(self, expected: dict[str, tuple[str, str]]) -> None:
        def holds() -> bool:
            return self.shown() == expected

        await until(holds, self.shown)


async def until(holds: Callable[[], bool], shown: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            while not holds():  # noqa: ASYNC110 - seen from outside
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"it stays at {shown()}") from None


@contextlib.asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(ApiServer())
        access = KubernetesAccess(server.url, namespace="default", token="suite-token")
        client = await stack.enter_async_context(KubernetesClient(access, timeout_s=5.0))
        service = await stack.enter_async_context(RoutingService(rng=random.Random(1)))
        pool = PoolServers(
            service, client, pool="llama", model="m", adapters=("sql",), rng=random.Random(1),
            pace=Pace(probe_s=1.0, retry_s=0.05, retry_s_max=0.2),
        )  # fmt: skip
        group = await stack.enter_async_context(asyncio.TaskGroup())
        running = group.create_task(pool.run())
        stack.callback(running.cancel)
        yield Scene(client, service)


async def test_ready_pods_are_servers_until_they_go():
    async with scene() as at:
        await at.put(pod("one", "10.0.0.1"))
        await at.put(pod("two", "fd00::2"))
        await at.put(pod("starting", "10.0.0.3", ready=False))
        await at.put(pod("other", "10.0.0.4", app="else"))
        await at.client.create(POOLS, POOL)
        both = {"one": ("http://10.0.0.1:8000", "ready"), "two": ("http://[fd00::2]:8000", "ready")}
        await at.becomes(both)
        assert {view.adapters for view in at.service.workers()} == {("sql",)}
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        await at.client.patch(PODS, "starting", ready, "status")
        await at.becomes({**both, "starting": ("http://10.0.0.3:8000", "ready")})
        await at.client.delete(PODS, "one")
        await at.client.delete(PODS, "starting")
        await at.becomes({"two": both["two"]})


async def test_another_selector_or_port_names_other_servers_and_no_pool_none():
    async with scene() as at:
        await at.put(pod("one", "10.0.0.1"))
        await at.put(pod("other", "10.0.0.4", app="else"))
        await at.client.create(POOLS, POOL)
        await at.becomes({"one": ("http://10.0.0.1:8000", "ready")})
        await at.client.patch(POOLS, "llama", {"spec": {"selector": {"matchLabels": {"app": "else"}}}})
        await at.becomes({"other": ("http://10.0.0.4:8000", "ready")})
        await at.client.patch(POOLS, "llama", {"spec": {"targetPorts": [{"number": 1}, {"number": 2}]}})
        await at.becomes(
            {"other:1": ("http://10.0.0.4:1", "ready"), "other:2": ("http://10.0.0.4:2", "ready")}
        )
        await at.client.delete(POOLS, "llama")
        await at.becomes({})
