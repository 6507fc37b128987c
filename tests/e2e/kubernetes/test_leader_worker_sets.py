"""A role whose workers span nodes becomes a LeaderWorkerSet: made, scaled by groups, seen in the status, and ended."""

import pytest

from penstock.deploy.hosts.kubernetes_connector import ROLES
from penstock.runtime.kubernetes import Resource
from tests.support.given_by import given_by
from tests.support.kubernetes.groups import definition

pytestmark = pytest.mark.slow
DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", is_namespaced=False
)
GROUPS = "leaderworkerset.x-k8s.io/leaderworkersets"
ROLE = {"aggregated": {"engine": "mock", "replicas": 2, "nodes": 2, "tensor_parallel": 2}}


def names(here) -> set[str]:
    return {pod["metadata"]["name"] for pod in here.cluster.pods("aggregated")}


@given_by("site")
async def test_groups_are_made_scaled_and_deleted(here) -> None:
    await here.client.create(DEFINITIONS, definition())
    await here.apply(roles=ROLE)
    await here.serves()
    assert here.objects(GROUPS).keys() == {"chat-aggregated"}
    assert (await here.status())["workers"] == "2/2", "a group is a worker"
    assert len(names(here)) == 4
    await here.client.patch(ROLES, "chat-aggregated", {"spec": {"replicas": 3}}, "scale")
    await here.until(lambda: len(names(here)) == 6)
    await here.serves()

    async def scaled():
        scale = await here.client.get(ROLES, "chat-aggregated", "scale")
        return scale["status"]["replicas"] == 3 and scale

    scale = await here.until(scaled)
    assert scale["status"]["selector"].endswith(",leaderworkerset.sigs.k8s.io/worker-index=0")
    here.server.store.delete(here.cluster.kind(GROUPS), ("default", "chat-aggregated"), {})
    await here.until(lambda: here.objects(GROUPS))
    await here.serves()
    await here.apply(roles={"aggregated": {"engine": "mock", "replicas": 2}})
    await here.until(lambda: not here.objects(GROUPS))
    await here.until(lambda: "chat-aggregated" in here.objects("apps/deployments"))


@given_by("site")
async def test_a_follower_that_fails_is_named_and_its_group_comes_back(here) -> None:
    await here.client.create(DEFINITIONS, definition())
    await here.apply(roles=ROLE)
    await here.serves()
    here.cluster.troubles["aggregated"] = "unschedulable"
    here.server.store.delete(here.cluster.kind("pods"), ("default", "chat-aggregated-1-1"), {})
    message = await here.says("Degraded", "Unschedulable")
    assert "chat-aggregated-1" in message
    assert (await here.condition("Ready"))["status"] == "True", "the other group serves"
    assert (await here.status())["workers"] == "1/2"
    here.cluster.troubles.clear()
    await here.serves()
    assert names(here) == {f"chat-aggregated-{group}" for group in ("0", "0-1", "1", "1-1")}


@given_by("site")
async def test_a_cluster_without_the_kind_is_told_and_serves_other_graphs(here) -> None:
    await here.apply()
    await here.serves()
    await here.apply("wide", roles=ROLE)

    async def is_told():
        condition = await here.condition("Degraded", "wide")
        return condition["reason"] == "ApplyFailed" and condition["message"]

    assert "the cluster has no LeaderWorkerSets" in await here.until(is_told)
    await here.client.create(DEFINITIONS, definition())
    await here.until(lambda: "wide-aggregated" in here.objects(GROUPS))
