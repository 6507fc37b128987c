"""Pods that are processes, under streams: what happens to pods, nodes and the API server loses nothing."""

import asyncio
import contextlib
import random
import re
import socket

import aiohttp
import pytest

from penstock.deploy.hosts.kubernetes_connector import ROLES
from penstock.deploy.manifests import network
from penstock.deploy.operator.cache import PODS
from penstock.deploy.operator.definitions import GRAPHS
from tests.support.given_by import given_by
from tests.support.kubernetes.eviction import is_ready
from tests.support.kubernetes.kubelet import Nodes, endpoints
from tests.support.streams import Load

pytestmark = pytest.mark.slow
PROMPTS = [f"The drain of node {number}" for number in range(6)]
TOKENS = 150
SERVICE_S = 1.0
"""Time in which proxies learn which pods a Service has."""
LEASE_S = 2.0
"""Of the operator and of workers."""
AWAY_S = 4 * LEASE_S


class Service:
    """A Service as clients see it: a free choice of pods, known a little late."""

    def __init__(self, site, port):
        self._site, self._port = site, port
        self._rng = random.Random(7)
        self.known = []

    async def follow(self):
        while True:
            self.known = endpoints(self._site.server.store, "frontend", self._port)
            await asyncio.sleep(SERVICE_S)

    def url(self):
        return self._rng.choice(self.known)


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
        runtime={"registry": {"lease_ttl_s": LEASE_S}},
        **(usual | graph),
    )
    here.start_operator(lease_s=LEASE_S)
    service = Service(here, port)
    tasks = [here.group.create_task(each) for each in (settle(here), service.follow())]
    await here.serves()
    await here.until(lambda: service.known)
    yield service
    for task in tasks:
        task.cancel()


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
                text = await answer.text()
            count += sum(map(float, re.findall(r"(?m)^penstock_router_migrations_total\{.*\} (\S+)", text)))
    return count


def restarts(here):
    """Give each pod's uid and how often its container was started again."""
    return {
        pod["metadata"]["uid"]: [each["restartCount"] for each in pod["status"]["containerStatuses"]]
        for pod in here.cluster.pods()
    }


@given_by("site", operator=False, timeout_s=400)
async def test_drained_deleted_killed_and_scaled_pods_lose_no_stream(here, tmp_path):
    async with running(here, tmp_path) as load:
        nodes = here.cluster.nodes
        nodes.cordon("node-1")
        drained = nodes.pods_on("node-1")
        assert {pod.split("-")[1] for pod in drained} == {"frontend", "aggregated"}
        progress = here.group.create_task(here.says("Progressing", "EvictionByEvictionAPI"))
        await asyncio.gather(*map(here.evict, drained))
        assert "drains" in await progress
        assert (await here.condition("Degraded"))["status"] == "False", "a drain is no fault"
        await here.until(lambda: not nodes.pods_on("node-1"))
        await here.serves()
        nodes.cordon("node-1", on=False)

        deleted, killed = sorted(here.names("aggregated"))
        await here.client.delete(PODS, deleted)
        await here.says("Progressing", deleted)
        await here.serves()
        await load.more(len(PROMPTS))
        nodes.kill(killed)
        assert "1 of 2 ready" in await here.says("Progressing", "aggregated")
        await here.serves()
        (container,) = here.objects("pods")[killed]["status"]["containerStatuses"]
        assert (container["restartCount"], container["lastState"]["terminated"]["exitCode"]) == (1, 137)
        for workers in (1, 2):
            await here.scale("chat-aggregated", workers)
            await here.has_pods("aggregated", workers)
            await here.serves()
            await load.more(len(PROMPTS))
        assert await migrations(here) > 0, "streams were under way"


@pytest.mark.nightly
@given_by("site", operator=False, timeout_s=400)
async def test_workers_that_are_evicted_at_once_go_one_at_a_time(here, tmp_path):
    async with running(here, tmp_path):
        assert sum(await asyncio.gather(*map(here.evict, here.names("aggregated")))), "a budget forbids it"


@pytest.mark.parametrize(
    ("change", "drain_s"),
    [
        pytest.param({"max_running_requests": 32}, 0.5, id="equal blocks"),
        pytest.param(
            {"kv_dtype": "fp8"}, 120.0, id="another revision takes no streams over", marks=pytest.mark.nightly
        ),
    ],
)
@given_by("site", operator=False, timeout_s=400)
async def test_new_pods_that_cannot_start_and_a_changed_graph_lose_no_stream(here, tmp_path, change, drain_s):
    async with running(here, tmp_path, tokens=2 * TOKENS, drain_s=drain_s) as load:
        here.cluster.troubles = {"aggregated": "image", "frontend": "image"}
        old = here.names()
        change = {"graph": {"roles": {"aggregated": change}}, "options": {"image": "r/penstock:2"}}
        await here.client.patch(GRAPHS, "chat", {"spec": change})
        await here.says("Degraded", "ImagePullFailed")
        await load.more(len(PROMPTS))
        here.cluster.troubles = {}

        def are_side_by_side():
            ready = {pod["metadata"]["name"] for pod in here.cluster.pods("aggregated") if is_ready(pod)}
            return ready & old and ready - old

        await here.until(are_side_by_side)
        await load.more(len(PROMPTS))
        await here.serves()
        assert not old & here.names()
        assert here.images() == {"r/penstock:2"}


@given_by("site", operator=False, timeout_s=400)
async def test_an_api_server_that_is_away_for_several_leases_stops_restarts_and_loses_nothing(here, tmp_path):
    async with running(here, tmp_path) as load:
        before = restarts(here)
        await here.server.stop()
        asyncio.get_running_loop().call_later(AWAY_S, (back := asyncio.Event()).set)
        while not back.is_set():
            await load.more(len(PROMPTS))
        assert restarts(here) == before, "while it was away"
        await here.server.start()
        await here.serves()
        assert restarts(here) == before
        await here.scale("chat-aggregated", 3)  # new workers find their deployment
        await here.has_pods("aggregated", 3)
        await here.serves()
        assert restarts(here).items() >= before.items()


@given_by("site", operator=False, timeout_s=300)
async def test_a_planners_pod_scales_its_role_out_and_in_and_loses_no_stream(here, tmp_path):
    """It ends the least loaded workers without the scheduler's choice, also after it was evicted itself."""
    planner = {"max_workers": 3, "react_period_s": 0.5, "floor_period_s": 2, "cool_down_s": 3, "cold_s": 1}
    role = {"engine": "mock", "replicas": 1, "max_running_requests": 2, "mock": {"speedup": 0.5}}
    graph = {"roles": {"aggregated": role}, "planner": planner, "slo": {"ttft_s": 0.2, "itl_s": 0.1}}

    async def wanted(count):
        spec = (await here.client.get(ROLES, "chat-aggregated"))["spec"]
        return spec["replicas"] == count and len(here.cluster.pods("aggregated")) == count

    async with deployed(here, tmp_path, **graph) as service:
        async with streaming(here, service) as load:
            await here.until(lambda: wanted(3))
            await load.more(len(PROMPTS))
            (first,) = here.names("planner")
            await here.evict(first)
            await here.until(lambda: here.names("planner") - {first})
        await here.until(lambda: wanted(1))
        spec = (await here.client.get(ROLES, "chat-aggregated"))["spec"]
        assert spec["leaving"], "the planner chose which end"
        await here.serves()


@given_by("site", operator=False, timeout_s=120)
async def test_pods_with_too_few_rights_do_not_become_ready_and_say_why(here, tmp_path, monkeypatch):
    short = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb != "create"]}
        for rule in network.DISCOVERY_RULES
    ]
    monkeypatch.setattr(network, "DISCOVERY_RULES", short)

    async def refused():
        said = 'User "system:serviceaccount:default:chat" cannot create resource "leases"'
        return any(said in path.read_text() for path in tmp_path.glob("chat-aggregated-*/log"))

    deployment = deployed(here, tmp_path, roles={"aggregated": {"engine": "mock", "replicas": 1}})
    starting = here.group.create_task(deployment.__aenter__())
    await here.until(refused)
    assert (await here.condition("Ready"))["status"] == "False"
    starting.cancel()
