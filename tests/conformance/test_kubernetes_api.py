"""What an API server keeps: asked of the one of the tests, and of a real cluster where KUBECONFIG names one.

The same tests ask both, so that the one of the tests promises nothing that a real one does not.
"""

import asyncio
import os
import random
import secrets
import ssl
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.core.errors import Unavailable
from penstock.runtime.kubernetes import (
    LEASES,
    KubernetesAccess,
    KubernetesClient,
    KubernetesError,
    Pace,
    Reflector,
    Resource,
)
from tests.support.certificates import make_authority, make_certificate
from tests.support.kubernetes.api_server import ApiServer

MAPS = Resource("", "v1", "configmaps", "ConfigMap")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet")
SERVICES = Resource("", "v1", "services", "Service")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", is_namespaced=False
)


class Cluster:
    """A cluster of somebody; objects of a test have a label of its own, and are deleted."""

    @asynccontextmanager
    async def scene(self):
        """Give a client, and a name of this test's own."""
        mark = secrets.token_hex(4)
        async with self.client() as client:
            try:
                yield client, f"suite-{mark}"
            finally:
                for resource in (MAPS, DEPLOYMENTS, LEASES, STATEFUL_SETS, SERVICES, CLAIMS, BINDINGS):
                    for body in (await client.list(resource, f"suite={mark}")).objects:
                        await client.delete(resource, body["metadata"]["name"])

    @asynccontextmanager
    async def client(self):
        async with KubernetesClient(KubernetesAccess.find(), timeout_s=20) as client:
            yield client


class Ours(Cluster):
    @asynccontextmanager
    async def client(self):
        async with ApiServer() as self.server:
            access = KubernetesAccess(self.server.url, namespace="default", token="suite-token")
            async with KubernetesClient(access, timeout_s=20) as client:
                yield client


@pytest.fixture(params=["ours", "real"])
def cluster(request):
    if request.param == "ours":
        return Ours()
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster")
    return Cluster()


def config_map(name, **data):
    metadata = {"name": name, "labels": {"suite": name.split("-")[1]}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


async def refused(call, status):
    with pytest.raises(KubernetesError) as caught:
        await call
    assert caught.value.status == status, caught.value
    return caught.value


async def test_a_stale_revision_is_refused(cluster):
    async with cluster.scene() as (client, name):
        first = await client.create(MAPS, config_map(name, a="1"))
        await refused(client.create(MAPS, config_map(name)), 409)
        changed = await client.replace(MAPS, {**first, "data": {"a": "2"}})
        assert changed["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
        assert "modified" in (await refused(client.replace(MAPS, {**first, "data": {"a": "3"}}), 409)).message
        revision = {"metadata": {"resourceVersion": first["metadata"]["resourceVersion"]}}
        await refused(client.patch(MAPS, name, revision | {"data": {"b": "1"}}), 409)
        await refused(client.delete(MAPS, name, revision=first["metadata"]["resourceVersion"]), 409)
        same = await client.replace(MAPS, changed)
        assert same["metadata"]["resourceVersion"] == changed["metadata"]["resourceVersion"], (
            "nothing changed"
        )


async def test_a_merge_patch_sets_and_removes(cluster):
    async with cluster.scene() as (client, name):
        await client.create(MAPS, config_map(name, a="1", b="2"))
        patched = await client.patch(MAPS, name, {"data": {"a": None, "c": "3"}})
        assert patched["data"] == {"b": "2", "c": "3"}
        await refused(client.patch(MAPS, f"{name}-none", {"data": {}}), 404)
        assert await client.find(MAPS, f"{name}-none") is None
        assert not await client.delete(MAPS, f"{name}-none")


async def test_apply_keeps_what_others_own(cluster):
    async with cluster.scene() as (client, name):
        await client.apply(MAPS, config_map(name, mine="1", old="1"), manager="first")
        await client.patch(MAPS, name, {"data": {"theirs": "1"}})
        applied = await client.apply(MAPS, config_map(name, mine="2"), manager="first")
        assert applied["data"] == {"mine": "2", "theirs": "1"}, (
            "what is no longer applied is removed, and no more"
        )
        error = await refused(
            client.apply(MAPS, config_map(name, mine="3"), manager="second", force=False), 409
        )
        assert 'conflict with "first"' in error.message
        assert ".data.mine" in error.message
        shared = await client.apply(MAPS, config_map(name, mine="2"), manager="second", force=False)
        assert {entry["manager"] for entry in shared["metadata"]["managedFields"]} >= {"first", "second"}
        left = await client.apply(MAPS, config_map(name), manager="first")
        assert left["data"]["mine"] == "2", "the second manager owns it, too"
        forced = await client.apply(MAPS, config_map(name, mine="4"), manager="first")
        assert forced["data"]["mine"] == "4"


def deployment(name, **container):
    labels = {"suite": name.split("-")[1]}
    containers = [{"name": "main", "image": "registry.invalid/none:1", **container}]
    template = {"metadata": {"labels": labels}, "spec": {"containers": containers}}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": labels},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template},
    }  # fmt: skip


async def test_apply_merges_containers_by_name(cluster):
    async with cluster.scene() as (client, name):
        first = deployment(name, args=["a"], env=[{"name": "A", "value": "1"}])
        await client.apply(DEPLOYMENTS, first, manager="first")
        other = {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
            "spec": {"template": {"spec": {"containers": [{"name": "main", "env": [{"name": "B", "value": "2"}]}]}}},
        }  # fmt: skip
        await client.apply(DEPLOYMENTS, other, manager="second", force=False)
        after = await client.apply(DEPLOYMENTS, deployment(name, args=["b"]), manager="first")
        (container,) = after["spec"]["template"]["spec"]["containers"]
        assert container["args"] == ["b"]
        assert container["env"] == [{"name": "B", "value": "2"}]
        assert after["metadata"]["generation"] > 1


def claim(size):
    return {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}


def port(number):
    return [{"name": "http", "port": number}]


SELECTOR = {"selector": {"matchLabels": {"app": "a"}}}
SETS = SELECTOR | {
    "serviceName": "a",
    "template": {
        "metadata": {"labels": {"app": "a"}},
        "spec": {"containers": [{"name": "main", "image": "none:1"}]},
    },
    "volumeClaimTemplates": [{"metadata": {"name": "disk"}, "spec": claim("1Gi")}],
}
DISK = {"volumeClaimTemplates": [{"metadata": {"name": "disk"}, "spec": claim("2Gi")}]}
OTHER = {"selector": {"matchLabels": {"app": "b"}}}
REF = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role"}


@pytest.mark.parametrize(
    ("resource", "made", "forbidden", "allowed"),
    [
        (STATEFUL_SETS, {"spec": SETS}, {"spec": DISK}, {"spec": {"replicas": 0, "revisionHistoryLimit": 3}}),
        (STATEFUL_SETS, {"spec": SETS}, {"spec": {"serviceName": "b"}}, {"spec": {"minReadySeconds": 1}}),
        (STATEFUL_SETS, {"spec": SETS}, {"spec": {"podManagementPolicy": "Parallel"}}, {}),
        (DEPLOYMENTS, {"spec": {"replicas": 0, **SELECTOR, "template": SETS["template"]}}, {"spec": OTHER}, {"spec": {"paused": True}}),
        (MAPS, {"immutable": True, "data": {"a": "1"}}, {"data": {"a": "2"}}, {"metadata": {"annotations": {"a": "1"}}}),
        (MAPS, {"immutable": True}, {"immutable": None}, {}),
        (SERVICES, {"spec": {"clusterIP": "None", "ports": port(80)}}, {"spec": {"clusterIP": "10.96.0.9"}}, {"spec": {"ports": port(81)}}),
        (SERVICES, {"spec": {"ports": port(80)}}, {"spec": {"clusterIP": "None"}}, {"spec": {"selector": {"app": "b"}}}),
        (CLAIMS, {"spec": claim("2Gi")}, {"spec": {"accessModes": ["ReadWriteMany"]}}, {}),
        (CLAIMS, {"spec": claim("2Gi")}, {"spec": claim("1Gi")}, {}),
        (BINDINGS, {"roleRef": REF | {"name": "a"}, "subjects": []}, {"roleRef": {"name": "b"}}, {}),
    ],
)  # fmt: skip
async def test_what_a_kind_never_changes_is_invalid(cluster, resource, made, forbidden, allowed):
    async with cluster.scene() as (client, name):
        metadata = {"name": name, "labels": {"suite": name.split("-")[1]}}
        body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
        await client.create(resource, body | made)
        error = await refused(client.patch(resource, name, forbidden), 422)
        assert f'"{name}" is invalid' in error.message
        await client.patch(resource, name, allowed)


async def test_a_label_has_63_characters(cluster):
    async with cluster.scene() as (client, name):
        body = config_map(name)
        body["metadata"]["labels"]["long"] = 63 * "x"
        await client.create(MAPS, body)
        await refused(client.patch(MAPS, name, {"metadata": {"labels": {"long": 64 * "x"}}}), 422)


async def test_scale_changes_replicas_and_is_locked(cluster):
    async with cluster.scene() as (client, name):
        await client.create(DEPLOYMENTS, deployment(name))
        before = await client.get(DEPLOYMENTS, name, "scale")
        assert before["kind"] == "Scale"
        assert before["spec"]["replicas"] == 0
        scaled = await client.patch(DEPLOYMENTS, name, {"spec": {"replicas": 1}}, "scale")
        assert scaled["spec"]["replicas"] == 1
        assert (await client.get(DEPLOYMENTS, name))["spec"]["replicas"] == 1
        await refused(client.replace(DEPLOYMENTS, {**before, "spec": {"replicas": 2}}, "scale"), 409)
        await refused(client.patch(DEPLOYMENTS, name, {"spec": {"replicas": -1}}, "scale"), 422)
        kept = await client.patch(DEPLOYMENTS, name, {"status": {"observedGeneration": 99}})
        assert kept.get("status", {}).get("observedGeneration") != 99, "status is a subresource"


async def test_dependents_go_with_their_owner_and_finalizers_wait(cluster):
    async with cluster.scene() as (client, name):
        owner = await client.create(MAPS, config_map(name))
        child = config_map(f"{name}-child")
        child["metadata"]["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": owner["metadata"]["uid"]}
        ]
        child["metadata"]["finalizers"] = ["penstock.dev/suite"]
        await client.create(MAPS, child)
        await client.delete(MAPS, name)
        while "deletionTimestamp" not in (await client.get(MAPS, f"{name}-child"))["metadata"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await client.patch(MAPS, f"{name}-child", {"metadata": {"finalizers": None}})
        while await client.find(MAPS, f"{name}-child") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_watch_tells_what_enters_and_leaves_its_selector(cluster):
    async with cluster.scene() as (client, name):
        labels = f"suite={name.split('-')[1]}"
        revision = (await client.list(MAPS, labels)).revision
        await client.create(MAPS, config_map(name, a="1"))
        await client.patch(MAPS, name, {"data": {"a": "2"}})
        await client.patch(MAPS, name, {"metadata": {"labels": {"suite": "away"}}})
        await client.patch(MAPS, name, {"metadata": {"labels": {"suite": name.split("-")[1]}}})
        await client.delete(MAPS, name)
        told = []
        async with aclosing(client.watch(MAPS, labels, revision, seconds=30)) as events:
            async for event in events:
                if event is not None and event.type != "BOOKMARK":
                    told.append(event.type)
                if len(told) == 5:
                    break
        assert told == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]


async def test_lists_come_in_pages(cluster):
    async with cluster.scene() as (client, name):
        for number in range(8):
            await client.create(MAPS, config_map(f"{name}-{number}"))
        found = await client.list(MAPS, f"suite={name.split('-')[1]}", page_objects=3)
        assert [body["metadata"]["name"] for body in found.objects] == [
            f"{name}-{number}" for number in range(8)
        ]


# What a real cluster does not do on demand.


async def test_a_compacted_revision_is_410():
    cluster = Ours()
    async with cluster.scene() as (client, name):
        revision = (await client.list(MAPS)).revision
        await client.create(MAPS, config_map(name))
        cluster.server.store.compact()
        with pytest.raises(KubernetesError, match="too old resource version") as caught:
            async for _ in client.watch(MAPS, "", revision, seconds=5):
                pass
        assert caught.value.status == 410


async def test_bookmarks_move_a_quiet_watch_past_compaction():
    cluster = Ours()
    async with cluster.scene() as (client, name):
        cluster.server.bookmark_s = 0.05
        revision = (await client.list(LEASES)).revision
        for number in range(5):
            await client.create(MAPS, config_map(f"{name}-{number}"))
        async with aclosing(client.watch(LEASES, "", revision, seconds=20)) as events:
            async for event in events:
                if event is not None:
                    assert event.type == "BOOKMARK"
                    revision = event.object["metadata"]["resourceVersion"]
                    break
        assert int(revision) == cluster.server.store.revision
        cluster.server.store.compact()
        async with aclosing(client.watch(LEASES, "", revision, seconds=1)) as events:
            assert [event async for event in events if event is not None and event.type != "BOOKMARK"] == []


class Copy:
    """A follower that keeps a copy."""

    def __init__(self):
        self.objects, self.lists, self.losses = {}, 0, 0

    def listed(self, objects):
        self.lists += 1
        self.objects = {body["metadata"]["name"]: body["data"] for body in objects}

    def put(self, body):
        self.objects[body["metadata"]["name"]] = body["data"]

    def deleted(self, body):
        self.objects.pop(body["metadata"]["name"], None)

    def connected(self):
        pass

    def lost(self, error):
        self.losses += 1


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))]
)
async def test_a_reflector_ends_with_what_there_is(seed):
    cluster = Ours()
    async with cluster.scene() as (client, name):
        server, rng, copy = cluster.server, random.Random(seed), Copy()
        server.bookmark_s = 0.1
        pace = Pace(probe_s=0.2, retry_s=0.01, retry_s_max=0.05)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(
                Reflector(client, MAPS, "", copy, pace=pace, rng=random.Random(seed)).run()
            )
            server.faults.rng = rng
            server.faults.drop_watch, server.faults.compact_watch, server.faults.slow_s = 0.2, 0.1, 0.005
            for number in range(60):
                key = f"{name}-{rng.randrange(6)}"
                kind = server.store.kinds.find("", "v1", "configmaps")
                if not await client.delete(MAPS, key) or rng.random() < 0.7:
                    await client.apply(MAPS, config_map(key, n=str(number)), manager="suite")
                if rng.random() < 0.05:
                    server.store.compact()
                if rng.random() < 0.05:
                    await server.stop()
                    await asyncio.sleep(0.02)
                    await server.start()
            want = {body.body["metadata"]["name"]: body.body.get("data") for body in server.store.all(kind)}
            while copy.objects != want:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert copy.lists > 1
            following.cancel()
        server.faults.drop_watch = server.faults.compact_watch = 0


LISTED = b'{"metadata": {"resourceVersion": "1"}, "items": %s}'
NO_LISTS = [LISTED % items for items in (b'"all"', b"[1]", b"[{}]")] + [
    b"{}",
    b"[]",
    b"<html>",
    b'{"metadata": null}',
    b'{"meta',
]
NO_EVENTS = [b"[1]", b"", b"null", b'{"type": "ADDED"}'] + [
    b'{"type": "%s", "object": %s}' % (type_, body) for type_ in (b"ADDED", b"BOOKMARK", b"ERROR") for body in (b'"x"', b"[]", b"{}")
]  # fmt: skip


@pytest.mark.parametrize(
    ("listed", "told"), [(each, b"") for each in NO_LISTS] + [(LISTED % b"[]", each) for each in NO_EVENTS]
)
async def test_an_answer_that_is_no_object_of_kubernetes_counts_as_none(listed, told):
    """As of a proxy that answers by itself: the reflector notes it, and asks again."""

    async def answer(request):
        return web.Response(body=told + b"\n" if "watch" in request.query else listed)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server, asyncio.TaskGroup() as group:
        access, copy = (
            KubernetesAccess(str(server.make_url("")).rstrip("/"), namespace="suite", token="x"),
            Copy(),
        )
        async with KubernetesClient(access, timeout_s=20) as client:
            reflector = Reflector(client, MAPS, "", copy, pace=Pace(9, 0.01, 0.01), rng=random.Random(1))
            following = group.create_task(reflector.run())
            while copy.losses < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            following.cancel()


GRAPHS = Resource("suite.dev", "v1", "graphs", "Graph")


def definition(**schema):
    names = {"plural": "graphs", "singular": "graph", "kind": "Graph"}
    version = {
        "name": "v1", "served": True, "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object", **schema}}}},
        "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}},
    }  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "graphs.suite.dev"},
        "spec": {"group": "suite.dev", "scope": "Namespaced", "names": names, "versions": [version]},
    }  # fmt: skip


async def test_custom_resources_are_checked_and_pruned():
    async with Ours().scene() as (client, name):
        graph = {
            "apiVersion": "suite.dev/v1",
            "kind": "Graph",
            "metadata": {"name": name},
            "spec": {"replicas": 1},
        }
        await refused(client.create(GRAPHS, graph), 404)
        await client.create(
            DEFINITIONS, definition(properties={"replicas": {"type": "integer", "minimum": 0}})
        )
        graph["spec"]["unknown"] = True
        made = await client.create(GRAPHS, graph)
        assert made["spec"] == {"replicas": 1}
        error = await refused(client.patch(GRAPHS, name, {"spec": {"replicas": "many"}}), 422)
        assert "spec.replicas" in error.message
        await client.patch(GRAPHS, name, {"spec": {"replicas": 3}}, "scale")
        assert (await client.get(GRAPHS, name))["spec"] == {"replicas": 3}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"description": "no type"}}}, r"properties\[a\].type: Required"),
        ({"additionalProperties": False}, "must not be false"),
        ({"properties": {"a": {"$ref": "#/x"}}}, r"unknown keywords \['\$ref'\]"),
        ({"properties": {"a": {"type": "integer", "exclusiveMinimum": 0}}}, "must be a boolean"),
        ({"properties": {"a": {"type": "string", "anyOf": [{"type": "string"}]}}}, "Forbidden"),
    ],
)
async def test_a_schema_that_is_not_structural_is_refused(schema, said):
    async with Ours().scene() as (client, _):
        with pytest.raises(KubernetesError, match=said):
            await client.create(DEFINITIONS, definition(**schema))


async def test_who_is_not_known_is_refused():
    cluster = Ours()
    async with cluster.scene() as (client, _):
        cluster.server.tokens = {"another"}
        await refused(client.list(MAPS), 401)
        cluster.server.tokens = {"suite-token"}


@pytest.mark.needs("openssl")
async def test_the_servers_certificate_is_checked(tmp_path):
    authority = make_authority(tmp_path, "authority")
    other = make_authority(tmp_path, "other")
    files = make_certificate(tmp_path, "127.0.0.1", authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    async with asyncio.timeout(30), ApiServer(tls=context) as server:
        options = {"namespace": "default", "token": "suite-token"}
        wrong = KubernetesAccess(server.url, authority=other, **options)
        async with KubernetesClient(wrong, timeout_s=10) as client:
            with pytest.raises(Unavailable, match=r"(?i)certificate"):
                await client.list(MAPS)
        unchecked = KubernetesAccess(server.url, verify=False, **options)
        async with KubernetesClient(unchecked, timeout_s=10) as client:
            assert (await client.list(MAPS)).objects == []
