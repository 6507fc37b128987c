"""A PenstockGraph becomes a deployment, changes in place, is scaled by others, and goes with all that is its."""

import random

import pytest

from penstock.deploy.operator import reconciler
from penstock.deploy.operator.definitions import GRAPHS, ROLES
from penstock.deploy.operator.desired import Desired
from penstock.runtime.kubernetes.client import KubernetesClient, KubernetesError, Resource
from tests.support.coroutines import given_by
from tests.support.kubernetes.faults import Faults

pytestmark = pytest.mark.slow
AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")


@given_by("site")
async def test_a_graph_runs_and_says_so(here):
    await here.apply()
    await here.serves()
    status = await here.status()
    assert status["workers"] == "3/3"
    assert status["summary"] == "Serving"
    assert {part["name"]: part["ready"] for part in status["parts"]} == {
        "frontend": 1,
        "prefill": 1,
        "decode": 2,
    }
    deployments = here.objects("apps/deployments")
    assert deployments.keys() == {"chat-frontend", "chat-prefill", "chat-decode"}
    (rule,) = here.objects("rbac.authorization.k8s.io/roles")["chat"]["rules"]
    assert rule["resources"] == ["leases"], "pods find each other by Leases"
    scale = await here.client.get(ROLES, "chat-decode", "scale")
    assert scale["status"] == {
        "replicas": 2,
        "selector": "app.kubernetes.io/name=penstock,app.kubernetes.io/instance=chat,app.kubernetes.io/component=decode",
    }


@given_by("site")
async def test_what_does_not_change_is_not_written_again(here):
    await here.apply()
    await here.serves()
    await here.until(lambda: here.server.store.revision)
    writes = [request for request in here.server.requests if request[0] in {"patch", "create", "delete"}]
    (pod, *_) = here.cluster.pods("decode")
    here.cluster._set_status(pod["metadata"]["name"], phase="Running", podIP="10.0.0.9")
    revision = here.server.store.revision
    for _ in range(10):
        await here.until(lambda: True)
    after = [request for request in here.server.requests if request[0] in {"patch", "create", "delete"}]
    assert after == writes
    assert here.server.store.revision <= revision + 10, "the leader's Lease alone"


@given_by("site")
async def test_changed_args_roll_and_old_configuration_goes_last(here):
    await here.apply()
    await here.serves()
    (first,) = here.objects("configmaps")
    here.cluster.held = {"decode"}
    old = {pod["metadata"]["name"] for pod in here.cluster.pods("decode")}
    await here.apply(block_size=32, options={"image": "r/penstock:2"})
    await here.until(lambda: is_progressing(here, "chat-decode"))  # at the latest when old pods drain
    await here.until(lambda: len(here.objects("configmaps")) == 2)

    def is_replaced():
        return any(pod["metadata"]["name"] not in old and "deletionTimestamp" not in pod["metadata"]
                   for pod in here.cluster.pods("decode")) and any(
            "deletionTimestamp" in pod["metadata"] for pod in here.cluster.pods("decode"))  # fmt: skip

    await here.until(is_replaced)
    assert first in here.objects("configmaps"), "a pod that drains still has it"
    assert (await here.condition("Ready"))["status"] == "True"
    here.cluster.held = set()
    await here.serves()
    await here.until(lambda: first not in here.objects("configmaps"))
    images = {pod["spec"]["containers"][0]["image"] for pod in here.cluster.pods()}
    assert images == {"r/penstock:2"}


@given_by("site")
async def test_a_roles_fields_of_pods_roll_its_pods_alone_and_go_with_the_graphs(here):
    await here.apply()
    await here.serves()
    before = {pod["metadata"]["name"] for pod in here.cluster.pods("prefill")}
    tolerations = [{"key": "pool", "operator": "Exists"}]
    fields = {
        "pod": {"tolerations": tolerations},
        "container": {"resources": {"limits": {"rdma/ib": 1}}},
    }
    await here.apply(roles={"prefill": {"replicas": 1}, "decode": {"replicas": 2, "kubernetes": fields}})

    def have():
        pods = here.cluster.pods("decode")
        return len(pods) == 2 and all(pod["spec"].get("tolerations") == tolerations for pod in pods)

    await here.until(have)
    await here.serves()
    assert {pod["metadata"]["name"] for pod in here.cluster.pods("prefill")} == before
    (pod, *_) = here.cluster.pods("decode")
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"rdma/ib": 1}
    fields = {"container": {"env": [{"name": "PENSTOCK_SECRET", "value": "x"}]}}
    await here.apply(kubernetes=fields)
    said = await here.is_true("Degraded", "InvalidGraph")
    assert "kubernetes.container.env: PENSTOCK_SECRET: is a variable that Penstock sets" in said
    await here.apply()
    await here.until(lambda: not any(pod["spec"].get("tolerations") for pod in here.cluster.pods("decode")))
    await here.serves()


@given_by("site")
async def test_a_gateway_gets_a_pool_that_goes_with_the_option(here):
    await here.apply(options={"image": "r/penstock:1", "gateway": "public"}, model="o/m")
    await here.serves()
    assert here.objects("inference.networking.k8s.io/inferencepools").keys() == {"chat"}
    assert here.objects("gateway.networking.k8s.io/httproutes").keys() == {"chat"}
    assert here.objects("apps/deployments").keys() == {
        "chat-frontend",
        "chat-prefill",
        "chat-decode",
        "chat-picker",
    }
    await here.apply(model="o/m")
    await here.until(lambda: not here.objects("inference.networking.k8s.io/inferencepools"))
    await here.until(lambda: "chat-picker" not in here.objects("apps/deployments"))
    await here.serves()


@given_by("site")
async def test_a_removed_role_goes_with_its_objects(here):
    await here.apply()
    await here.serves()
    await here.apply(roles={"aggregated": {"replicas": 1}})
    await here.until(lambda: here.objects("apps/deployments").keys() == {"chat-frontend", "chat-aggregated"})
    await here.until(lambda: not here.cluster.pods("decode"))
    await here.serves()
    assert [role["metadata"]["name"] for role in (await here.client.list(ROLES)).objects] == [
        "chat-aggregated"
    ]
    assert "chat-decode" not in here.objects("policy/poddisruptionbudgets")


@given_by("site")
async def test_a_deleted_graph_takes_everything_with_it(here):
    await here.apply()
    await here.serves()
    await here.client.delete(GRAPHS, "chat")
    kinds = (
        "apps/deployments",
        "configmaps",
        "services",
        "serviceaccounts",
        "pods",
        "policy/poddisruptionbudgets",
    )
    await here.until(lambda: not any(here.objects(kind) for kind in kinds))
    assert not (await here.client.list(ROLES)).objects


@given_by("site")
async def test_scaling_a_role_scales_its_pods_and_stays(here):
    await here.apply()
    await here.serves()
    await here.scale("chat-decode", 4)
    await here.until(lambda: len(here.cluster.pods("decode")) == 4)
    await here.until(lambda: has_workers(here, "5/5"))
    await here.apply(block_size=32)
    await here.serves()
    assert len(here.cluster.pods("decode")) == 4, "the graph's number did not change"
    await here.apply(roles={"prefill": {"replicas": 1}, "decode": {"replicas": 3}})
    await here.until(lambda: len(here.cluster.pods("decode")) == 3)
    await here.scale("chat-decode", 0)
    message = await here.until(lambda: not_ready(here, "NoWorkers"))
    assert "no worker of decode is ready" in message


async def is_progressing(here, text):
    condition = await here.condition("Progressing")
    return condition["status"] == "True" and text in condition["message"]


async def has_workers(here, text):
    return (await here.status()).get("workers") == text


async def not_ready(here, reason):
    condition = await here.condition("Ready")
    return condition["message"] if (condition["status"], condition["reason"]) == ("False", reason) else ""


def autoscaler(kind, name):
    spec = {
        "scaleTargetRef": {"apiVersion": "x/v1", "kind": kind, "name": name},
        "minReplicas": 1,
        "maxReplicas": 8,
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "keda"},
        "spec": spec,
    }


@given_by("site")
async def test_an_autoscaler_owns_the_number(here):
    await here.apply()
    await here.serves()
    await here.client.create(AUTOSCALERS, autoscaler("PenstockRole", "chat-decode"))
    await here.scale("chat-decode", 5)
    await here.until(lambda: len(here.cluster.pods("decode")) == 5)
    await here.apply(roles={"prefill": {"replicas": 2}, "decode": {"replicas": 3}})
    await here.until(lambda: len(here.cluster.pods("prefill")) == 2)
    await here.serves()
    assert len(here.cluster.pods("decode")) == 5, "the graph yields"
    parts = {part["name"]: part["scaledBy"] for part in (await here.status())["parts"]}
    assert parts == {"frontend": "", "prefill": "", "decode": "keda"}


@given_by("site")
async def test_an_autoscaler_of_the_pods_themselves_is_left_alone_too(here):
    await here.apply()
    await here.serves()
    await here.client.create(AUTOSCALERS, autoscaler("Deployment", "chat-decode"))
    await here.until(lambda: is_scaled_by(here, "keda"))
    await here.client.patch(DEPLOYMENTS, "chat-decode", {"spec": {"replicas": 5}}, "scale")
    await here.until(lambda: len(here.cluster.pods("decode")) == 5)
    await here.apply(block_size=32)
    await here.serves()
    assert len(here.cluster.pods("decode")) == 5


async def is_scaled_by(here, name):
    parts = {part["name"]: part["scaledBy"] for part in (await here.status()).get("parts", ())}
    return parts.get("decode") == name


@given_by("site")
async def test_a_role_that_answers_for_servers_has_one_pod_however_it_is_scaled(here):
    servers = {"engine": {"name": "openai", "args": {"url": ["http://vllm-0:8000", "http://vllm-1:8000"]}}}
    await here.apply(roles={"aggregated": servers}, model="o/m")
    await here.serves()
    await here.scale("chat-aggregated", 3)
    await here.apply(roles={"aggregated": servers}, model="o/m", block_size=32)
    await here.serves()
    assert len(here.cluster.pods("aggregated")) == 1, "a second would count the servers again"
    assert here.objects("apps/deployments")["chat-aggregated"]["spec"]["replicas"] == 1


def test_a_model_is_not_looked_for_on_the_operators_disk(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)

    async def scenario(here):
        await here.apply(model="org/model")
        await here.serves()
        await here.apply(model="./org/model")
        assert "model: ./org/model: is relative to a directory" in await here.is_true(
            "Degraded", "InvalidGraph"
        )

    site(scenario)


@given_by("site")
async def test_a_change_by_hand_is_undone(here):
    await here.apply()
    await here.serves()
    await here.client.patch(DEPLOYMENTS, "chat-decode", {"spec": {"replicas": 7}})
    await here.until(lambda: here.objects("apps/deployments")["chat-decode"]["spec"]["replicas"] == 2)
    await here.client.delete(DEPLOYMENTS, "chat-prefill")
    await here.until(lambda: "chat-prefill" in here.objects("apps/deployments"))
    await here.serves()


@given_by("site")
async def test_a_graph_that_no_pod_could_have_is_said_and_what_runs_stays(here):
    await here.apply()
    await here.serves()
    await here.apply(worker={"own_cores": True})
    assert "worker.own_cores" in await here.is_true("Degraded", "InvalidGraph")
    condition = await here.condition("Ready")
    assert (condition["status"], condition["reason"]) == ("False", "InvalidGraph")
    assert len(here.cluster.pods("decode")) == 2
    await here.apply()
    await here.serves()


def test_a_profile_is_refused_and_not_read_from_the_operators_disk(site, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("bearer-token-of-the-operator")

    async def scenario(here):
        roles = {"aggregated": {"replicas": 1, "profile": str(secret)}}
        await here.apply(roles=roles)
        message = await here.is_true("Degraded", "InvalidGraph")
        assert (
            f"spec.graph.roles.aggregated.profile: {secret}: would be a file of the operator's disk"
            in message
        )
        assert not here.objects("configmaps")
        await here.apply(roles={"aggregated": {"replicas": 1, "profile": "/nope"}})
        await here.until(lambda: is_said(here, "profile: /nope"))
        await here.apply()
        await here.serves()

    site(scenario)


async def is_said(here, text):
    return text in (await here.condition("Degraded"))["message"]


def test_a_graph_at_which_the_operator_fails_stops_no_other(site, monkeypatch):
    of = Desired.of

    def fails(body):
        if body["metadata"]["name"] == "odd":
            raise FileNotFoundError(f"no such file: {body['metadata']['resourceVersion']}")
        return of(body)

    monkeypatch.setattr(Desired, "of", fails)

    async def scenario(here):
        await here.apply("odd")

        async def is_said():
            condition = await here.condition("Degraded", "odd")
            return condition["reason"] == "OperatorFailed" and "FileNotFoundError" in condition["message"]

        await here.until(is_said)
        await here.apply()
        await here.serves()
        monkeypatch.setattr(Desired, "of", of)

        async def is_mended():
            return (await here.condition("Degraded", "odd"))["status"] == "False"

        await here.until(is_mended)

    site(scenario)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ({"block_size": 0}, "spec.graph.block_size"),
        ({"block_size": "many"}, "spec.graph.block_size"),
        ({"model": None}, "spec.graph"),
        ({"roles": {"decode": {"replicas": -1}}}, "spec.graph.roles.decode.replicas"),
    ],
)
@given_by("site", operator=False)
async def test_the_api_server_refuses_what_the_schema_says(here, graph, said):
    body = {
        "apiVersion": GRAPHS.api_version, "kind": GRAPHS.kind, "metadata": {"name": "chat"},
        "spec": {"graph": {"model": "demo", **graph}},
    }  # fmt: skip
    with pytest.raises(KubernetesError, match=said) as caught:
        await here.client.create(GRAPHS, body)
    assert caught.value.status == 422


@given_by("site")
async def test_a_refused_object_is_said_and_tried_again(here):
    here.server.forbidden.add(("patch", "services"))
    await here.apply()
    assert "services is forbidden" in await here.is_true("Degraded", "ApplyFailed")
    here.server.forbidden.clear()
    await here.serves()


def test_a_passing_refusal_is_tried_again_and_nobodys_to_act_on(site, monkeypatch):
    apply, left = KubernetesClient.apply, [409, 429, 503]

    async def refuses(self, resource, body, *, manager, **options):
        if manager == "penstock-operator" and left:
            raise KubernetesError("busy", status=left.pop())
        return await apply(self, resource, body, manager=manager, **options)

    written = []
    write = reconciler.write_graph_status

    async def kept(client, body, status):
        written.append(status["summary"])
        await write(client, body, status)

    monkeypatch.setattr(KubernetesClient, "apply", refuses)
    monkeypatch.setattr(reconciler, "write_graph_status", kept)

    async def scenario(here):
        await here.apply()
        await here.serves()
        assert not left
        assert "ApplyFailed" not in written

    site(scenario)


@pytest.mark.parametrize("seed", range(3))
@given_by("site")
async def test_faults_of_the_api_server_end_in_what_is_wanted(here, seed):
    here.server.faults = Faults(
        random.Random(seed),
        error=0.1,
        too_many=0.05,
        retry_after_s=0,
        drop=0.05,
        drop_watch=0.1,
        compact_watch=0.03,
    )
    rng = random.Random(seed)
    for _ in range(4):
        try:
            await here.apply(
                block_size=rng.choice([16, 32]), options={"image": f"r/penstock:{rng.randrange(9)}"}
            )
        except Exception:  # noqa: BLE001 - the test's own calls fail, too
            continue
        asked = len(here.server.requests)
        await here.until(lambda: len(here.server.requests) > asked + 5)  # noqa: B023 - called at once
    await here.until(lambda: here.server.faults.count > 3)
    here.server.faults = Faults()
    await here.apply(block_size=64)
    await here.serves()
    (graph,) = here.objects("configmaps").values()
    assert "block_size: 64" in graph["data"]["graph.yaml"]


@given_by("site")
async def test_the_pod_that_the_planner_names_ends_first_and_an_autoscaler_is_told_to_the_planner(here):
    async def owner_of_decode(here, name):
        return (await here.client.get(ROLES, "chat-decode"))["status"].get("scaledBy") == name

    await here.apply()
    await here.serves()
    first, second = sorted(pod["metadata"]["name"] for pod in here.cluster.pods("decode"))
    change = {"spec": {"replicas": 1, "leaving": [first]}}
    await here.client.patch(ROLES, "chat-decode", change)
    await here.until(lambda: [pod["metadata"]["name"] for pod in here.cluster.pods("decode")] == [second])
    await here.client.patch(ROLES, "chat-decode", {"spec": {"replicas": 2}})
    await here.until(lambda: len(here.cluster.pods("decode")) == 2)
    await here.client.patch(ROLES, "chat-decode", {"spec": {"leaving": [second]}})

    def mark():
        (pod,) = [each for each in here.cluster.pods("decode") if each["metadata"]["name"] == second]
        return (pod["metadata"].get("annotations") or {}).get(reconciler.DELETION_COST)

    await here.until(lambda: mark() == reconciler.FIRST_TO_END)
    await here.client.patch(ROLES, "chat-decode", {"spec": {"leaving": []}})
    await here.until(lambda: mark() is None)
    target = {"apiVersion": ROLES.api_version, "kind": ROLES.kind, "name": "chat-decode"}
    autoscaler = {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "decode-hpa"},
        "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 8},
    }  # fmt: skip
    await here.client.create(AUTOSCALERS, autoscaler)
    await here.until(lambda: owner_of_decode(here, "decode-hpa"))
    await here.client.delete(AUTOSCALERS, "decode-hpa")
    await here.until(lambda: owner_of_decode(here, ""))


@given_by("site")
async def test_a_graph_with_a_planner_runs_one_more_pod_that_no_autoscaler_counts(here):
    await here.apply(planner={"max_workers": 4})
    await here.serves()
    assert len(here.cluster.pods("planner")) == 1
    assert (await here.status())["workers"] == "3/3"
