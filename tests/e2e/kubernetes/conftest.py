"""An operator beside an API server and the controllers of a cluster, all on the test's event loop."""

import asyncio
import contextlib
import random
from pathlib import Path

import aiohttp
import pytest
import yaml
from prometheus_client import CollectorRegistry

from penstock.deploy.operator.definitions import GRAPHS, ROLES, definitions
from penstock.deploy.operator.leadership import LOCK
from penstock.deploy.operator.operator import Operator
from penstock.runtime.kubernetes import KubernetesAccess, KubernetesClient, Pace, Resource
from penstock.testing.loop import run_async
from tests.support.kubernetes.api_server import ApiServer
from tests.support.kubernetes.cluster import Cluster

DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", is_namespaced=False
)
FILE = Path(__file__).parents[3] / "deploy" / "kubernetes" / "operator.yaml"
OBJECTS = list(yaml.safe_load_all(FILE.read_text()))
RULES = [
    {**rule, "namespace": each["metadata"]["namespace"]}
    for each in OBJECTS
    if each["kind"] == "Role"
    for rule in each["rules"]
]
"""What the operator may do: no more than its file says."""
PAIR = {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}


class Site:
    """What a test does to a cluster, and sees of it."""

    def __init__(self, server, client, group):
        self.server, self.client, self.group = server, client, group
        self.cluster = Cluster(server.store)
        self.access = KubernetesAccess(server.url, namespace="default", token="operator-token")
        self.registry = CollectorRegistry()

    def operator(self, identity="first", lease_s=5.0):
        return Operator(
            self.access,
            rng=random.Random(identity),
            identity=identity,
            lease_s=lease_s,
            pace=Pace(probe_s=0.5, retry_s=0.02, retry_s_max=0.2),
            registry=self.registry if identity == "first" else None,
        )

    def start_operator(self, identity="first", lease_s=5.0):
        return self.group.create_task(self.operator(identity, lease_s).run())

    async def apply(self, name="chat", *, roles=PAIR, options=None, **graph):
        body = {
            "apiVersion": GRAPHS.api_version, "kind": GRAPHS.kind, "metadata": {"name": name},
            "spec": {"graph": {"model": "demo", "roles": roles} | graph, "options": options or {"image": "r/penstock:1"}},
        }  # fmt: skip
        return await self.client.apply(GRAPHS, body, manager="suite")

    async def up(self, **graph):
        """Apply a graph, and wait until all is as it should be."""
        await self.apply(**graph)
        await self.serves()

    async def status(self, name="chat"):
        return (await self.client.get(GRAPHS, name)).get("status") or {}

    async def condition(self, kind, name="chat"):
        for each in (await self.status(name)).get("conditions", ()):
            if each["type"] == kind:
                return each
        return {"status": "Unknown", "reason": "", "message": ""}

    async def until(self, check):
        """Let the cluster go on until `check` gives something true; the scenario's time limit bounds it."""
        while True:
            self.cluster.settle()
            found = check()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.02)

    async def says(self, kind, text, *, status="True", name="chat"):
        """Wait until a condition has this status, and `text` as its reason or in its message; returns the message."""

        async def check():
            condition = await self.condition(kind, name)
            is_so = condition["status"] == status and text in f"{condition['reason']} {condition['message']}"
            return condition["message"] or "no message" if is_so else ""

        return await self.until(check)

    async def serves(self):
        """Wait until all is as it should be."""

        async def check():
            body = await self.client.get(GRAPHS, "chat")
            conditions = {each["type"]: each for each in (body.get("status") or {}).get("conditions", ())}
            return conditions and [conditions[kind]["status"] for kind in ("Ready", "Progressing", "Degraded")] == [
                "True", "False", "False",
            ] and conditions["Ready"]["observedGeneration"] == body["metadata"]["generation"]  # fmt: skip

        await self.until(check)

    def objects(self, plural):
        """Give those of graphs: not the operators' own lock."""
        return {
            stored.body["metadata"]["name"]: stored.body
            for stored in self.server.store.all(self.cluster.kind(plural))
            if stored.body["metadata"]["name"] != LOCK or plural != "configmaps"
        }

    def names(self, part=None):
        return {pod["metadata"]["name"] for pod in self.cluster.pods(part)}

    def images(self):
        return {pod["spec"]["containers"][0]["image"] for pod in self.cluster.pods()}

    async def has_pods(self, part, count):
        await self.until(lambda: len(self.cluster.pods(part)) == count)

    async def parts(self, field):
        """Give a field of each part in the status, by the part's name."""
        return {part["name"]: part[field] for part in (await self.status())["parts"]}

    async def evict(self, pod):
        """Evict a pod as kubectl drain does, again while a budget forbids it; returns how often it did."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": "default"},
        }
        url = f"{self.server.url}/api/v1/namespaces/default/pods/{pod}/eviction"
        refused = 0
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer suite-token"}) as session:
            while True:
                async with session.post(url, json=body) as answer:
                    if answer.status in {201, 404}:
                        return refused
                    assert answer.status == 429, await answer.text()
                refused += 1
                await asyncio.sleep(0.2)

    async def scale(self, role, replicas):
        await self.client.patch(ROLES, role, {"spec": {"replicas": replicas}}, "scale")


@pytest.fixture
def site():
    """Run a scenario with an operator, unless the scenario starts its own."""

    def run(scenario, *, operator=True, lease_s=5.0, timeout_s=60):
        async def main():
            async with (
                asyncio.timeout(timeout_s),
                ApiServer(tokens=("suite-token", "operator-token")) as server,
            ):
                server.rules["operator-token"] = RULES
                access = KubernetesAccess(server.url, namespace="default", token="suite-token")
                async with (
                    KubernetesClient(access, timeout_s=10) as client,
                    asyncio.TaskGroup() as group,
                ):
                    for definition in definitions():
                        await client.create(DEFINITIONS, definition)
                    here = Site(server, client, group)
                    running = here.start_operator(lease_s=lease_s) if operator else None
                    await scenario(here)
                    for task in tuple(group._tasks):
                        task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        if running is not None:
                            await running

        run_async(main(), timeout_s=timeout_s)

    return run
