"""Pods that are processes, under streams: a drained node, an evicted or deleted pod, and new pods that cannot start lose nothing."""

import asyncio
import contextlib
import random
import re
import socket

import aiohttp
import pytest

from penstock.deploy.manifests.kubernetes.access import DISCOVERY_RULES
from penstock.deploy.operator.definitions import GRAPHS
from penstock.runtime.kubernetes.client import Resource
from tests.support.coroutines import given_by
from tests.support.kubernetes.eviction import is_ready
from tests.support.kubernetes.kubelet import Nodes, endpoints
from tests.support.streams import Load

pytestmark = pytest.mark.slow
PODS = Resource("", "v1", "pods", "Pod")
PROMPTS = [f"The drain of node {number}" for number in range(6)]
TOKENS = 150
SERVICE_S = 1.0
"""Time in which proxies learn which pods a Service has."""


class Service:
    """A Service as clients see it: a free choice of pods, known a little late."""

    def __init__(self, site, port):
        self._site, self._port = site, port
        self._rng = random.Random(7)
        self._known = []

    async def follow(self):
        while True:
            self._known = endpoints(self._site.server.store, "frontend", self._port)
            await asyncio.sleep(SERVICE_S)

    def url(self):
        return self._rng.choice(self._known)


@contextlib.asynccontextmanager
async def deployed(here, tmp_path, *, drain_s=0.5, **graph):
    """Run a graph as processes; gives the Service of its frontends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here.cluster.nodes = Nodes(here.server, tmp_path, here.group, secrets={"secret": "a secret of the test"})
    usual = {"roles": {"aggregated": {"engine": "mock", "replicas": 2, "mock": {"speedup": 0.5}}}}
    await here.apply(
        frontend={"port": port, "processes": 2},
        supervision={"spare_processes": 0},
        worker={"drain_timeout_s": drain_s},
        **(usual | graph),
    )
    here.start_operator(lease_s=15)
    settling = here.group.create_task(settle(here))
    service = Service(here, port)
    following = here.group.create_task(service.follow())
    await here.serves()
    await asyncio.sleep(2 * SERVICE_S)
    yield service
    following.cancel()
    settling.cancel()


@contextlib.asynccontextmanager
async def running(here, tmp_path, *, tokens=TOKENS, drain_s=0.5):
    """Run a graph as processes, with streams through its frontends."""
    async with (
        deployed(here, tmp_path, drain_s=drain_s) as service,
        streaming(here, service, tokens=tokens) as load,
    ):
        yield load


@contextlib.asynccontextmanager
async def streaming(here, service, *, tokens=TOKENS):
    """Send streams; each has to be whole, and as it is undisturbed."""
    since = (await here.condition("Ready"))["lastTransitionTime"]
    async with Load(service.url, PROMPTS, tokens=tokens) as load:
        await load.more(len(PROMPTS))
        yield load
        await here.serves()
        await load.more(2 * len(PROMPTS))
    for prompt, answers in load.answers.items():
        assert len(answers) == 1, f"{prompt}: not every stream gave the same"
    ready = await here.condition("Ready")
    assert (ready["status"], ready["lastTransitionTime"]) == ("True", since), "it was ready all the time"


async def settle(here):
    """Play controllers."""
    while True:
        here.cluster.settle()
        await asyncio.sleep(0.05)


async def migrations(here):
    """Count the requests that had to leave their worker, at all frontends."""
    count = 0
    async with aiohttp.ClientSession() as session:
        for pod in here.cluster.pods("frontend"):
            (http, *_) = pod["spec"]["containers"][0]["ports"]
            url = f"http://{pod['status']['podIP']}:{http['containerPort']}/metrics"
            async with session.get(url) as answer:
                found = re.findall(
                    r"^penstock_router_migrations_total\{.*\} (\S+)", await answer.text(), re.MULTILINE
                )
            count += sum(map(float, found))
    return count


async def says(here, kind, text):
    condition = await here.condition(kind)
    return condition["message"] if condition["status"] == "True" and text in condition["message"] else ""


@given_by("site", operator=False, timeout_s=400)
async def test_a_drained_node_loses_no_stream(here, tmp_path):
    async with running(here, tmp_path) as load:
        nodes = here.cluster.nodes
        for node in ("node-1", "node-2"):
            nodes.cordon(node)
            drained = nodes.pods_on(node)
            assert {pod.split("-")[1] for pod in drained} == {"frontend", "aggregated"}
            progress = here.group.create_task(
                here.until(lambda: says(here, "Progressing", "EvictionByEvictionAPI"))
            )
            await asyncio.gather(*map(here.evict, drained))
            await progress
            assert (await here.condition("Degraded"))["status"] == "False", "a drain is no fault"
            await here.until(lambda node=node: not nodes.pods_on(node))
            await here.serves()
            nodes.cordon(node, on=False)
            await load.more(len(PROMPTS))


@given_by("site", operator=False, timeout_s=400)
async def test_evicted_deleted_and_scaled_workers_lose_no_stream(here, tmp_path):
    async with running(here, tmp_path) as load:
        workers = [pod["metadata"]["name"] for pod in here.cluster.pods("aggregated")]
        progress = here.group.create_task(
            here.until(lambda: says(here, "Progressing", "EvictionByEvictionAPI"))
        )
        assert sum(await asyncio.gather(*map(here.evict, workers))), "a budget lets one go at a time"
        assert "drains" in await progress
        await here.serves()
        (pod, *_) = (each["metadata"]["name"] for each in here.cluster.pods("aggregated"))
        await here.client.delete(PODS, pod)
        assert pod in await here.until(lambda: says(here, "Progressing", pod))
        await load.more(len(PROMPTS))
        await here.serves()
        for workers in (1, 2):
            await here.scale("chat-aggregated", workers)
            await here.until(lambda workers=workers: len(here.cluster.pods("aggregated")) == workers)
            await here.serves()
            await load.more(len(PROMPTS))
        assert await migrations(here) > 0, "streams were under way"


@given_by("site", operator=False, timeout_s=400)
async def test_a_killed_pod_loses_no_stream(here, tmp_path):
    async with running(here, tmp_path) as load:
        (pod, _) = (each["metadata"]["name"] for each in here.cluster.pods("aggregated"))
        here.cluster.nodes.kill(pod)
        assert "1 of 2 ready" in await here.until(lambda: says(here, "Progressing", "aggregated"))
        await load.more(len(PROMPTS))
        await here.serves()
        (container,) = here.objects("pods")[pod]["status"]["containerStatuses"]
        assert (container["restartCount"], container["lastState"]["terminated"]["exitCode"]) == (1, 137)
        assert await migrations(here) > 0, "streams were under way"


@pytest.mark.parametrize(
    ("trouble", "reason"), [("image", "ImagePullFailed"), ("unschedulable", "Unschedulable")]
)
@given_by("site", operator=False, timeout_s=400)
async def test_new_pods_that_cannot_start_lose_no_stream(here, tmp_path, trouble, reason):
    async with running(here, tmp_path) as load:
        here.cluster.troubles = {"aggregated": trouble, "frontend": trouble}
        await here.client.patch(GRAPHS, "chat", {"spec": {"options": {"image": "r/penstock:2"}}})
        await here.is_true("Degraded", reason)
        await load.more(2 * len(PROMPTS))
        here.cluster.troubles = {}
        await here.serves()
        images = {pod["spec"]["containers"][0]["image"] for pod in here.cluster.pods()}
        assert images == {"r/penstock:2"}


@pytest.mark.parametrize(
    ("change", "drain_s"),
    [
        pytest.param({"roles": {"aggregated": {"max_running_requests": 32}}}, 0.5, id="equal blocks"),
        pytest.param(
            {"roles": {"aggregated": {"kv_dtype": "fp8"}}},
            120.0,
            id="another revision takes no streams over",
        ),
    ],
)
@given_by("site", operator=False, timeout_s=400)
async def test_a_changed_graph_rolls_and_loses_no_stream(here, tmp_path, change, drain_s):
    async with running(here, tmp_path, tokens=4 * TOKENS, drain_s=drain_s) as load:
        old = {pod["metadata"]["name"] for pod in here.cluster.pods()}
        await here.client.patch(GRAPHS, "chat", {"spec": {"graph": change}})

        def are_side_by_side():
            ready = {pod["metadata"]["name"] for pod in here.cluster.pods("aggregated") if is_ready(pod)}
            return ready & old and ready - old

        await here.until(are_side_by_side)
        await load.more(len(PROMPTS))
        await here.serves()
        assert not old & {pod["metadata"]["name"] for pod in here.cluster.pods()}


def test_pods_with_too_few_rights_do_not_become_ready_and_say_why(site, tmp_path, monkeypatch):
    short = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb != "create"]} for rule in DISCOVERY_RULES
    ]
    monkeypatch.setattr("penstock.deploy.manifests.kubernetes.access.DISCOVERY_RULES", short)

    async def scenario(here):
        async def refused():
            logs = [path.read_text() for path in tmp_path.glob("chat-aggregated-*/log")]
            return any(
                'User "system:serviceaccount:default:chat" cannot create resource "leases"' in log
                for log in logs
            )

        deployment = deployed(here, tmp_path, roles={"aggregated": {"engine": "mock", "replicas": 1}})
        starting = here.group.create_task(deployment.__aenter__())
        await here.until(refused)
        assert (await here.condition("Ready"))["status"] == "False"
        starting.cancel()

    site(scenario, operator=False, timeout_s=120)
