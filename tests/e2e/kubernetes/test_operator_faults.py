"""What an API server, other operators and users do to a graph while it rolls out: it ends whole, or its conditions say what is missing."""

import asyncio
import contextlib
import random

import pytest

from penstock.deploy.hosts.kubernetes_connector import ROLES
from penstock.deploy.operator.cache import DEPLOYMENTS, KEPT
from penstock.deploy.operator.definitions import GRAPHS
from penstock.runtime.kubernetes import KubernetesError
from tests.e2e.kubernetes.conftest import DEFINITIONS, PAIR
from tests.e2e.kubernetes.test_leadership import take_lead
from tests.support.given_by import given_by
from tests.support.kubernetes.faults import Faults

pytestmark = pytest.mark.slow
NEW = "r/penstock:2"


@contextlib.asynccontextmanager
async def rolling(here):
    """Begin a roll-out that is in its middle: new and old pods are there."""
    await here.up()
    await here.apply(options={"image": NEW})
    await here.until(lambda: here.images() == {"r/penstock:1", NEW})
    yield
    await here.serves()
    assert here.images() == {NEW}
    assert len(here.cluster.pods("decode")) == 2


@given_by("site", lease_s=0.6)
async def test_an_api_server_that_goes_away_in_the_middle_of_a_roll_out(here):
    async with rolling(here):
        await here.server.stop()
        await asyncio.sleep(1.5)  # the lead is lost
        await here.server.start()


@pytest.mark.parametrize("trouble", ["hangs", "forgets the token"])
@given_by("site", lease_s=0.6)
async def test_a_roll_out_waits_for_an_api_server_that(here, trouble):
    """Watches are silent, and calls have no answer or 401, for several lease times of this operator."""
    async with rolling(here):
        pods = here.names()
        if trouble == "hangs":
            here.server.pause()
        else:
            here.server.tokens.discard("operator-token")
        await asyncio.sleep(2)
        assert here.names() >= pods, "nothing is taken away"
        here.server.resume()
        here.server.tokens.add("operator-token")


@given_by("site")
async def test_an_api_server_that_refuses_slowly_delays_a_roll_out_and_breaks_nothing(here):
    async with rolling(here):
        here.server.faults = Faults(
            random.Random(1), token="operator-token", too_many=0.3, retry_after_s=1, unavailable=0.3, slow_s=0.3
        )  # fmt: skip
        await here.until(lambda: here.server.faults.count > 8)
        assert len(here.cluster.pods("decode")) >= 2
        here.server.faults = Faults()


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
            await here.apply(roles=PAIR | {"decode": {"replicas": replicas}}, options={"image": NEW})
            await here.has_pods("decode", replicas)
        disturbing.cancel()


@pytest.mark.parametrize("refusal", [(403, "Forbidden"), (503, "ServiceUnavailable")])
@given_by("site")
async def test_writes_that_are_refused_for_long_are_said_and_stop_no_other(here, refusal):
    """Each refusal has other words, as those of a webhook that numbers its requests: no loop of status and news of it."""
    await here.up()
    here.server.refusal = refusal
    here.server.forbidden.add(("patch", "serviceaccounts"))
    await here.apply(options={"image": NEW})
    await here.says("Degraded", "ApplyFailed")
    await here.until(lambda: here.images() == {NEW})
    asked = len(here.server.requests)
    await asyncio.sleep(1)
    assert len(here.server.requests) - asked < 60, "it waits longer each time"
    here.server.forbidden.clear()
    await here.serves()


@given_by("site", lease_s=0.6)
async def test_the_lead_changes_in_the_middle_of_a_roll_out(here):
    async with rolling(here):
        second = here.start_operator("second")
        await take_lead(here, "nobody", 1)
        await here.apply(options={"image": NEW}, block_size=32)
    second.cancel()


@given_by("site")
async def test_a_graph_of_another_schema_is_said_and_what_runs_stays(here):
    await here.up()
    definition = await here.client.get(DEFINITIONS, f"{GRAPHS.plural}.{GRAPHS.group}")
    (version,) = definition["spec"]["versions"]
    version["schema"]["openAPIV3Schema"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    await here.client.replace(DEFINITIONS, definition)  # as of another release
    pods, graph = here.names(), await here.client.get(GRAPHS, "chat")
    demo = {"model": "demo"}
    for spec, said in (
        ({"graph": "everything"}, "spec.graph: must be a mapping"),
        ({"graph": demo, "options": ["image"]}, "spec.options: must be a mapping"),
        ({"graph": demo | {"roles": "many"}}, "spec.graph"),
        ({"graph": demo | {"runtime": "local"}}, "spec.graph"),
        ({"graph": {"model": {"a": [1]}}}, "spec.graph"),
        ({"graph": demo | {"of_a_newer_release": {"a": 1}}}, "of_a_newer_release"),
        (None, "spec.graph: must be a mapping"),
    ):
        replaced = await here.client.replace(GRAPHS, await here.client.get(GRAPHS, "chat") | {"spec": spec})
        generation = replaced["metadata"]["generation"]

        async def is_seen(generation=generation):
            return (await here.condition("Degraded")).get("observedGeneration") == generation

        await here.until(is_seen)
        condition = await here.condition("Degraded")
        assert condition["reason"] == "InvalidGraph"
        assert said in condition["message"]
        assert here.names() == pods
    await here.client.replace(GRAPHS, await here.client.get(GRAPHS, "chat") | {"spec": graph["spec"]})
    await here.serves()


@given_by("site")
async def test_what_a_user_deletes_comes_back(here):
    await here.up()
    for resource in KEPT:
        plural = f"{resource.group}/{resource.plural}".removeprefix("/")
        names = here.objects(plural).keys()
        assert names
        for name in names:
            await here.client.delete(resource, name)
        await here.until(lambda plural=plural, names=names: here.objects(plural).keys() == names)
    await here.client.delete(DEPLOYMENTS, "chat-prefill")
    await here.until(lambda: "chat-prefill" in here.objects("apps/deployments"))
    await here.serves()


@given_by("site")
async def test_numbers_that_a_user_edits_at_the_pods_return_and_those_at_the_role_stay(here):
    async with rolling(here):
        await here.client.patch(DEPLOYMENTS, "chat-decode", {"spec": {"replicas": 7}})
        await here.client.patch(DEPLOYMENTS, "chat-frontend", {"spec": {"replicas": 0}})
    await here.scale("chat-decode", 3)
    await here.has_pods("decode", 3)
    body = {"apiVersion": ROLES.api_version, "kind": ROLES.kind, "metadata": {"name": "mine"}}
    await here.client.create(ROLES, body | {"spec": {"graph": "chat", "role": "decode", "replicas": 9}})
    await here.up(block_size=32, options={"image": NEW})
    assert len(here.cluster.pods("decode")) == 3, "a role of another name scales nothing"


@given_by("site")
async def test_a_graph_that_is_deleted_in_the_middle_of_a_roll_out_goes_whole_and_may_come_again(here):
    await here.up()
    await here.apply(options={"image": NEW})
    await here.until(lambda: here.images() == {"r/penstock:1", NEW})
    await here.client.delete(GRAPHS, "chat")
    await here.until(lambda: not here.cluster.pods())
    for kind in ("apps/deployments", "services", "configmaps", "serviceaccounts"):
        assert not here.objects(kind)
    assert not (await here.client.list(ROLES)).objects
    await here.up()
    await here.client.delete(GRAPHS, "chat")
    await here.up(options={"image": NEW})  # at once
    assert here.images() == {NEW}
