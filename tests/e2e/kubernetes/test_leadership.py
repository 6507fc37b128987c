"""Of several operators one acts; another goes on when it ends, dies or cannot reach the API server."""

import asyncio
import random

import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry

from penstock.deploy.operator.cache import DEPLOYMENTS
from penstock.deploy.operator.definitions import GRAPHS
from penstock.deploy.operator.http import OperatorHttp
from penstock.deploy.operator.leadership import CONFIG_MAPS, LOCK
from penstock.deploy.operator.operator import Operator
from penstock.runtime.kubernetes import KubernetesAccess, KubernetesClient, KubernetesError
from tests.support.given_by import given_by

pytestmark = pytest.mark.slow


async def holder(here):
    lock = await here.client.find(CONFIG_MAPS, LOCK)
    return (lock or {}).get("data", {}).get("operator")


async def leads(here, name):
    """Wait until an operator leads."""

    async def check():
        return await holder(here) == name

    await here.until(check)


async def take_lead(here, name, seconds):
    await here.client.patch(CONFIG_MAPS, LOCK, {"data": {"operator": name, "seconds": str(seconds)}})


def value(here, name, **labels):
    return here.registry.get_sample_value(f"penstock_operator_{name}", labels)


@given_by("site", operator=False)
async def test_one_acts_and_the_next_begins_at_once_when_it_ends(here):
    first = here.start_operator("first", lease_s=60)
    await leads(here, "first")
    here.start_operator("second", lease_s=2)
    await here.up()
    assert await holder(here) == "first"
    first.cancel()
    await leads(here, "second")  # long before 60 s
    await here.up(block_size=32)


@given_by("site", operator=False)
async def test_a_lock_that_nobody_renews_is_taken_after_its_time(here):
    lock = {
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": LOCK, "labels": {"penstock.dev/claim": "operator"}},
        "data": {"operator": "dead", "seconds": "1"},
    }  # fmt: skip
    await here.client.create(CONFIG_MAPS, lock)
    here.start_operator("second")
    await asyncio.sleep(0.5)
    assert await holder(here) == "dead", "it may live"
    await leads(here, "second")


@given_by("site", lease_s=0.6)
async def test_a_leader_whose_lock_was_taken_stops_and_counts_no_graphs(here):
    await here.up()
    assert value(here, "graphs") == 1.0
    await take_lead(here, "other", 3600)
    await here.until(lambda: value(here, "graphs") == 0.0)
    await here.until(lambda: not here.server.open_requests)  # its watches have ended
    await here.apply(block_size=32)
    requests = len(here.server.requests)
    await asyncio.sleep(0.6)
    acted = [verb for verb, _ in here.server.requests[requests:] if verb in {"patch", "create", "delete"}]
    assert acted == []


@given_by("site")
async def test_no_pod_may_take_the_lead(here):
    await here.up()
    token = here.server.token_of("default", "chat")
    access = KubernetesAccess(here.server.url, namespace="default", token=token)
    async with KubernetesClient(access, timeout_s=10) as pod:
        for call in (
            pod.patch(CONFIG_MAPS, LOCK, {"data": {"operator": "pod"}}),
            pod.delete(CONFIG_MAPS, LOCK),
        ):
            with pytest.raises(KubernetesError) as caught:
                await call
            assert caught.value.status == 403


@given_by("site", operator=False)
async def test_probes_and_metrics_say_how_the_operator_is(here):
    here.server.forbidden.add(("list", "penstockroles"))
    operator = here.operator("first", lease_s=2)
    async with (
        OperatorHttp("tcp://127.0.0.1:0", here.registry, operator.is_ready) as http,
        ClientSession() as session,
    ):

        async def ask(path):
            async with session.get(f"http://127.0.0.1:{http.port}{path}") as answer:
                return answer.status, await answer.text()

        async def is_ready():
            return (await ask("/readyz"))[0] == 200

        async def is_away():
            return not await is_ready()

        assert await is_away(), "nothing has answered yet"
        here.group.create_task(operator.run())
        await here.until(lambda: value(here, "leader") == 1.0)
        assert await is_away(), "its definitions are missing"
        here.server.forbidden.clear()
        await here.until(is_ready)
        await here.up()
        assert (await ask("/healthz"), await ask("/readyz")) == ((200, "ok\n"),) * 2
        assert "penstock_operator_graphs 1.0" in (await ask("/metrics"))[1]
        assert value(here, "reconciles_total", outcome="done") > 0
        here.server.forbidden.add(("patch", "services"))
        await here.apply(block_size=32)
        await here.until(lambda: value(here, "reconciles_total", outcome="failed"))
        await here.server.stop()
        await here.until(lambda: value(here, "leader") == 0.0)
        await here.until(is_away)
        assert (await ask("/healthz"))[0] == 200, "a restart would not help"
        await here.server.start()


def another_operator(here, *, namespace, registry=None):
    access = KubernetesAccess(here.server.url, namespace=namespace, token="suite-token")
    return Operator(access, rng=random.Random(2), identity="second", lease_s=1, registry=registry), access


@given_by("site")
async def test_operators_of_two_namespaces_both_act(here):
    await leads(here, "first")
    operator, access = another_operator(here, namespace="second")
    running = here.group.create_task(operator.run())
    async with KubernetesClient(access, timeout_s=10) as second:
        spec = {"graph": {"model": "demo", "roles": {"aggregated": {}}}}
        body = {"apiVersion": GRAPHS.api_version, "kind": GRAPHS.kind, "metadata": {"name": "chat"}}
        await second.create(GRAPHS, body | {"spec": spec})
        await here.up()
        await here.until(lambda: second.find(DEPLOYMENTS, "chat-frontend"))
    running.cancel()


@given_by("site", operator=False)
async def test_an_operator_that_runs_elsewhere_waits_for_the_same_lock(here):
    first = here.start_operator("first", lease_s=1)
    await here.up()
    registry = CollectorRegistry()
    second, _ = another_operator(here, namespace="default", registry=registry)

    def is_leader():
        return registry.get_sample_value("penstock_operator_leader") == 1.0

    running = here.group.create_task(second.run())
    await here.until(second.is_ready)
    await asyncio.sleep(2)  # longer than the lock lasts
    assert not is_leader(), "the first one renews it"
    first.cancel()
    await here.until(is_leader)
    await here.up(block_size=16)
    running.cancel()
