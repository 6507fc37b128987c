"""What an API server, other operators and users do to a graph while it rolls out: it ends whole, or its conditions say what is missing."""

import asyncio
import contextlib
import random

import pytest
from aiohttp import ClientSession

from penstock.deploy.hosts.roles import ROLES
from penstock.deploy.operator.cache import DEPLOYMENTS, KEPT
from penstock.deploy.operator.definitions import GRAPHS
from penstock.deploy.operator.http import OperatorHttp
from penstock.deploy.operator.operator import lease_name
from penstock.runtime.kubernetes.client import LEASES, KubernetesClient, KubernetesError
from tests.e2e.kubernetes.conftest import DEFINITIONS
from tests.support.coroutines import given_by
from tests.support.kubernetes.faults import Faults

pytestmark = pytest.mark.slow
NEW = "r/penstock:2"


@contextlib.asynccontextmanager
async def rolling(here):
    """Begin a roll-out that is in its middle: new and old pods are there."""
    await here.apply()
    await here.serves()
    await here.apply(options={"image": NEW})
    await here.until(lambda: {"r/penstock:1", NEW} == images(here))
    yield
    await here.serves()
    assert images(here) == {NEW}
    assert len(here.cluster.pods("decode")) == 2


def images(here):
    return {pod["spec"]["containers"][0]["image"] for pod in here.cluster.pods()}


@given_by("site")
async def test_an_api_server_that_goes_away_in_the_middle_of_a_roll_out(here):
    async with rolling(here):
        await here.server.stop()
        await asyncio.sleep(1.5)
        await here.server.start()


@given_by("site")
async def test_watches_that_expire_all_the_time(here):
    here.server.faults = Faults(random.Random(1), compact_watch=0.7)
    async with rolling(here):
        pass
    assert here.server.faults.count > 5


@given_by("site")
async def test_every_write_of_a_number_meets_another_one(here):
    async def disturb():
        while True:
            with contextlib.suppress(KubernetesError):
                number = {"metadata": {"annotations": {"suite": str(random.random())}}}
                await here.client.patch(ROLES, "chat-decode", number)
            await asyncio.sleep(0.001)

    async with rolling(here):
        disturbing = here.group.create_task(disturb())
        for replicas in (3, 4, 2):
            await here.apply(roles={"prefill": {}, "decode": {"replicas": replicas}}, options={"image": NEW})
            await here.until(lambda count=replicas: len(here.cluster.pods("decode")) == count)
        disturbing.cancel()


def test_writes_that_are_refused_for_long_are_said_and_end(site, monkeypatch):
    apply, refuses = KubernetesClient.apply, []

    async def refused(self, resource, body, *, manager, **options):
        if refuses and manager == "penstock-operator" and resource.kind == "Service":
            raise KubernetesError("failed calling webhook", status=500)
        return await apply(self, resource, body, manager=manager, **options)

    monkeypatch.setattr(KubernetesClient, "apply", refused)

    async def scenario(here):
        await here.apply()
        await here.serves()
        refuses.append(True)
        await here.apply(options={"image": NEW})
        assert "failed calling webhook" in await here.is_true("Degraded", "ApplyFailed")
        asked = len(here.server.requests)
        await asyncio.sleep(1)
        assert len(here.server.requests) - asked < 60, "it waits longer each time"
        refuses.clear()
        await here.serves()
        assert images(here) == {NEW}

    site(scenario)


@given_by("site")
async def test_the_lead_changes_in_the_middle_of_a_roll_out(here):
    async with rolling(here):
        second = here.start_operator("second")
        await here.leases.patch(
            LEASES,
            lease_name("default"),
            {"spec": {"holderIdentity": "nobody", "leaseDurationSeconds": 1}},
        )
        await here.apply(options={"image": NEW}, block_size=32)
    second.cancel()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"graph": "everything"}, "spec.graph: must be a mapping"),
        ({"graph": {"model": "demo"}, "options": ["image"]}, "spec.options: must be a mapping"),
        ({"graph": {"model": "demo", "roles": "many"}}, "spec.graph"),
        ({"graph": {"model": "demo", "runtime": "local"}}, "spec.graph"),
        ({"graph": {"model": "demo", "planner": 7}}, "spec.graph"),
        ({"graph": {"model": {"a": [1]}}}, "spec.graph"),
        ({"graph": {"model": "demo", "of_a_newer_release": {"a": 1}}}, "of_a_newer_release"),
        ({}, "spec.graph: must be a mapping"),
        (None, "spec.graph: must be a mapping"),
    ],
)
@given_by("site")
async def test_a_graph_of_another_schema_is_said_and_what_runs_stays(here, spec, said):
    await here.apply()
    await here.serves()
    definition = await here.client.get(DEFINITIONS, f"{GRAPHS.plural}.{GRAPHS.group}")
    (version,) = definition["spec"]["versions"]
    version["schema"]["openAPIV3Schema"] = {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
    }
    await here.client.replace(DEFINITIONS, definition)  # as of another release
    pods = {pod["metadata"]["name"] for pod in here.cluster.pods()}
    graph = await here.client.get(GRAPHS, "chat")
    before = graph["spec"]
    await here.client.replace(GRAPHS, graph | {"spec": spec})
    assert said in await here.is_true("Degraded", "InvalidGraph")
    assert {pod["metadata"]["name"] for pod in here.cluster.pods()} == pods
    await here.client.replace(GRAPHS, await here.client.get(GRAPHS, "chat") | {"spec": before})
    await here.serves()


@pytest.mark.parametrize("kind", [resource.kind for resource in KEPT])
@given_by("site")
async def test_what_a_user_deletes_comes_back(here, kind):
    await here.apply()
    await here.serves()
    resource = next(each for each in KEPT if each.kind == kind)
    names = here.objects(f"{resource.group}/{resource.plural}".removeprefix("/"))
    for name in names:
        await here.client.delete(resource, name)
    await here.until(
        lambda: here.objects(f"{resource.group}/{resource.plural}".removeprefix("/")).keys() == names.keys()
    )
    assert names
    await here.serves()


@given_by("site")
async def test_numbers_that_a_user_edits_at_the_pods_return_and_those_at_the_role_stay(here):
    async with rolling(here):
        await here.client.patch(DEPLOYMENTS, "chat-decode", {"spec": {"replicas": 7}})
        await here.client.patch(DEPLOYMENTS, "chat-frontend", {"spec": {"replicas": 0}})
    await here.scale("chat-decode", 3)
    await here.until(lambda: len(here.cluster.pods("decode")) == 3)
    await here.client.create(
        ROLES,
        {
            "apiVersion": ROLES.api_version, "kind": ROLES.kind, "metadata": {"name": "mine"},
            "spec": {"graph": "chat", "role": "decode", "replicas": 9},
        },
    )  # fmt: skip
    await here.apply(block_size=32, options={"image": NEW})
    await here.serves()
    assert len(here.cluster.pods("decode")) == 3, "a role of another name scales nothing"


@given_by("site")
async def test_a_graph_that_is_deleted_in_the_middle_of_a_roll_out_goes_whole_and_may_come_again(here):
    await here.apply()
    await here.serves()
    await here.apply(options={"image": NEW})
    await here.until(lambda: {"r/penstock:1", NEW} == images(here))
    await here.client.delete(GRAPHS, "chat")
    await here.until(lambda: not here.cluster.pods())
    for kind in ("apps/deployments", "services", "configmaps", "serviceaccounts"):
        assert not here.objects(kind)
    await here.apply()
    await here.serves()
    await here.client.delete(GRAPHS, "chat")
    await here.apply(options={"image": NEW})  # at once
    await here.serves()
    assert images(here) == {NEW}


@given_by("site", operator=False)
async def test_an_operator_whose_definitions_are_missing_is_not_ready(here):
    here.server.forbidden.add(("list", "penstockroles"))
    operator = here.operator("first", lease_s=5)
    async with (
        OperatorHttp("tcp://127.0.0.1:0", here.registry, operator.is_ready) as http,
        ClientSession() as session,
    ):

        async def ready():
            async with session.get(f"http://127.0.0.1:{http.port}/readyz") as answer:
                return answer.status == 200

        here.group.create_task(operator.run())
        leads = lambda: here.registry.get_sample_value("penstock_operator_leader") == 1.0  # noqa: E731
        await here.until(leads)
        assert not await ready()
        here.server.forbidden.clear()
        await here.until(ready)
