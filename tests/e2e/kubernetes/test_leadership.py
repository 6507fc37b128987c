"""Of several operators one acts; another goes on when it ends, dies or cannot reach the API server."""

import asyncio
import random

import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.deploy.operator.cache import DEPLOYMENTS
from penstock.deploy.operator.definitions import GRAPHS
from penstock.deploy.operator.http import OperatorHttp
from penstock.deploy.operator.operator import Operator, lease_name
from penstock.runtime.kubernetes.access import KubernetesAccess
from penstock.runtime.kubernetes.client import LEASES, KubernetesClient, KubernetesError
from tests.support.coroutines import given_by

pytestmark = pytest.mark.slow
LEASE = lease_name("default")


async def holder(here):
    lease = await here.leases.find(LEASES, LEASE)
    return (lease or {}).get("spec", {}).get("holderIdentity")


@given_by("site", operator=False)
async def test_one_acts_and_the_next_begins_at_once_when_it_ends(here):
    first = here.start_operator("first", lease_s=60)
    await here.until(lambda: is_holder(here, "first"))
    here.start_operator("second", lease_s=2)
    await here.apply()
    await here.serves()
    assert await holder(here) == "first"
    first.cancel()
    await here.until(lambda: is_holder(here, "second"))  # long before 60 s
    await here.apply(block_size=32)
    await here.serves()


async def is_holder(here, name):
    return await holder(here) == name


@given_by("site", operator=False)
async def test_a_lease_that_nobody_renews_is_taken_after_its_time(here):
    lease = {
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE},
        "spec": {"holderIdentity": "dead", "leaseDurationSeconds": 1, "renewTime": "2099-01-01T00:00:00.000000Z"},
    }  # fmt: skip
    await here.leases.create(LEASES, lease)
    here.start_operator("second")
    await asyncio.sleep(0.5)
    assert await holder(here) == "dead", "its clock may be wrong, but it may live"
    await here.until(lambda: is_holder(here, "second"))


@given_by("site", operator=False)
async def test_a_leader_whose_lease_was_taken_stops(here):
    here.start_operator("first")
    await here.until(lambda: is_holder(here, "first"))
    await here.leases.patch(LEASES, LEASE, {"spec": {"holderIdentity": "other", "leaseDurationSeconds": 60}})
    await here.until(lambda: not here.server._handlers)  # its watches have ended
    await here.apply()
    requests = len(here.server.requests)
    await asyncio.sleep(0.6)
    acted = [
        request for request in here.server.requests[requests:] if request[0] in {"patch", "create", "delete"}
    ]
    assert acted == []
    assert await here.status() == {}


@given_by("site")
async def test_an_api_server_that_was_away_finds_its_operator_again(here):
    await here.apply()
    await here.serves()
    await here.server.stop()
    await asyncio.sleep(1.5)  # the lead is lost
    await here.server.start()
    await here.apply(block_size=32)
    await here.serves()


@given_by("site")
async def test_no_pod_may_take_the_lead(here):
    await here.until(lambda: is_holder(here, "first"))
    await here.apply()
    await here.serves()
    token = here.server.token_of("default", "chat")
    access = KubernetesAccess(here.server.url, namespace="penstock-operator", token=token)
    async with KubernetesClient(access, timeout_s=10) as pod:
        for call in (
            pod.patch(LEASES, LEASE, {"spec": {"holderIdentity": "pod"}}),
            pod.delete(LEASES, LEASE),
        ):
            with pytest.raises(KubernetesError) as caught:
                await call
            assert caught.value.status == 403


@given_by("site", operator=False)
async def test_probes_and_metrics_say_how_the_operator_is(here):
    operator = here.operator("first", lease_s=2)
    async with (
        OperatorHttp("tcp://127.0.0.1:0", here.registry, operator.is_ready) as http,
        ClientSession() as session,
    ):

        async def ask(path):
            async with session.get(f"http://127.0.0.1:{http.port}{path}") as answer:
                return answer.status, await answer.text()

        async def says(text):
            return text in (await ask("/metrics"))[1]

        assert (await ask("/readyz"))[0] == 503, "nothing has answered yet"
        here.group.create_task(operator.run())
        await here.apply()
        await here.serves()
        assert (await ask("/healthz"), await ask("/readyz")) == ((200, "ok\n"),) * 2
        assert await says("penstock_operator_leader 1.0")
        assert await says("penstock_operator_graphs 1.0")
        assert here.registry.get_sample_value("penstock_operator_reconciles_total", {"outcome": "done"}) > 0
        here.server.forbidden.add(("patch", "services"))
        await here.apply(block_size=32)
        await here.until(lambda: says('penstock_operator_reconciles_total{outcome="failed"}'))
        await here.server.stop()
        await here.until(lambda: says("penstock_operator_leader 0.0"))

        async def is_away():
            return (await ask("/readyz"))[0] == 503

        await here.until(is_away)
        assert (await ask("/healthz"))[0] == 200, "a restart would not help"
        await here.server.start()


@given_by("site")
async def test_operators_of_two_namespaces_both_act(here):
    await here.until(lambda: is_holder(here, "first"))
    access, leases = (
        KubernetesAccess(here.server.url, namespace=namespace, token="suite-token")
        for namespace in ("second", "penstock-operator")
    )
    operator = Operator(
        access, rng=random.Random(2), identity="of the second", lease_access=leases, lease_s=5
    )
    running = here.group.create_task(operator.run())
    async with KubernetesClient(access, timeout_s=10) as second:
        graph = {"model": "demo", "roles": {"aggregated": {}}}
        await second.create(
            GRAPHS,
            {"apiVersion": GRAPHS.api_version, "kind": GRAPHS.kind, "metadata": {"name": "chat"}, "spec": {"graph": graph}},
        )  # fmt: skip
        await here.apply()
        await here.serves()
        await here.until(lambda: second.find(DEPLOYMENTS, "chat-frontend"))
    running.cancel()


@given_by("site", operator=False)
async def test_operators_of_two_namespaces_never_act_on_one(here):
    first = here.start_operator("first", lease_s=4)
    await here.apply()
    await here.serves()
    leases = KubernetesAccess(here.server.url, namespace="others", token="suite-token")
    access = KubernetesAccess(here.server.url, namespace="default", token="suite-token")
    registry = CollectorRegistry()
    second = Operator(
        access,
        rng=random.Random(2),
        identity="second",
        lease_access=leases,
        lease_s=2,
        registry=registry,
    )
    with capture_logs() as logs:
        running = here.group.create_task(second.run())
        await here.until(lambda: registry.get_sample_value("penstock_operator_conflict") == 1.0)
        await asyncio.sleep(6)  # longer than the claim lasts
        assert registry.get_sample_value("penstock_operator_conflict") == 1.0, "the first one renews it"
        assert registry.get_sample_value("penstock_operator_leader") == 0.0
        assert not second.is_ready()
    said = [line for line in logs if line["event"] == "namespace_operated_by_another"]
    assert {(line["operator_of"], line["own_namespace"]) for line in said} == {
        ("penstock-operator", "others")
    }
    await here.apply(block_size=32)
    await here.serves()
    first.cancel()
    await here.until(lambda: registry.get_sample_value("penstock_operator_leader") == 1.0)
    assert registry.get_sample_value("penstock_operator_conflict") == 0.0
    await here.apply(block_size=16)
    await here.serves()
    running.cancel()


@given_by("site")
async def test_an_operator_without_the_lead_counts_no_graphs(here):
    def graphs():
        return here.registry.get_sample_value("penstock_operator_graphs")

    await here.apply()
    await here.serves()
    assert graphs() == 1.0
    await here.leases.patch(
        LEASES, LEASE, {"spec": {"holderIdentity": "other", "leaseDurationSeconds": 3600}}
    )
    await here.until(lambda: graphs() == 0.0)
