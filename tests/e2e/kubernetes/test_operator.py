"""A PenstockGraph becomes a deployment, changes in place, is scaled by others, and loses the roles that it loses."""

import random
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from penstock.deploy.operator import reconciler
from penstock.deploy.operator.cache import AUTOSCALERS, DEPLOYMENTS, KEPT, STATEFUL_SETS
from penstock.deploy.operator.definitions import GRAPHS, ROLES
from penstock.deploy.operator.reconciler import Desired
from tests.e2e.kubernetes.conftest import DEFINITIONS, PAIR
from tests.support.given_by import given_by
from tests.support.kubernetes.faults import Faults
from tests.support.kubernetes.groups import definition

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
AUTOSCALER = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "autoscaler.yaml").read_text())
((METRIC,),) = ([each["external"]["metric"]["name"]] for each in AUTOSCALER["spec"]["metrics"])


def writes(here):
    return [request for request in here.server.requests if request[0] in {"patch", "create", "delete"}]


@given_by("site")
async def test_a_graph_runs_and_says_so_and_what_does_not_change_is_not_written_again(here):
    await here.up()
    status = await here.status()
    assert (status["workers"], status["summary"]) == ("3/3", "Serving")
    assert await here.parts("ready") == {"frontend": 1, "prefill": 1, "decode": 2}
    deployments = here.objects("apps/deployments")
    assert deployments.keys() == {"chat-frontend", "chat-prefill", "chat-decode"}
    (rule,) = here.objects("rbac.authorization.k8s.io/roles")["chat"]["rules"]
    assert rule["resources"] == ["leases"], "pods find each other by Leases"
    scale = await here.client.get(ROLES, "chat-decode", "scale")
    labels = {"name": "penstock", "instance": "chat", "component": "decode"}
    selector = ",".join(f"app.kubernetes.io/{name}={value}" for name, value in labels.items())
    assert scale["status"] == {"replicas": 2, "selector": selector}

    before, revision = writes(here), here.server.store.revision
    here.cluster.set_status(min(here.names("decode")), phase="Running", podIP="10.0.0.9")
    for _ in range(10):
        await here.until(lambda: True)
    assert writes(here) == before
    assert here.server.store.revision <= revision + 11, "the pod's status, and the leader's Lease"


@given_by("site")
async def test_changed_args_roll_and_old_configuration_goes_last(here):
    await here.up()
    (first,) = here.objects("configmaps")
    here.cluster.held = {"decode"}
    old = here.names("decode")
    await here.apply(block_size=32, options={"image": "r/penstock:2"})
    await here.says("Progressing", "chat-decode")  # at the latest when old pods drain
    await here.until(lambda: len(here.objects("configmaps")) == 2)

    def is_replaced():
        ending = {"deletionTimestamp" in pod["metadata"] for pod in here.cluster.pods("decode")}
        return here.names("decode") - old and True in ending

    await here.until(is_replaced)
    assert first in here.objects("configmaps"), "a pod that drains still has it"
    assert (await here.condition("Ready"))["status"] == "True"
    here.cluster.held = set()
    await here.serves()
    await here.until(lambda: first not in here.objects("configmaps"))
    assert here.images() == {"r/penstock:2"}


@given_by("site")
async def test_a_roles_fields_of_pods_roll_its_pods_alone_and_go_with_the_graphs(here):
    await here.up()
    before = here.names("prefill")
    tolerations = [{"key": "pool", "operator": "Exists"}]
    await here.apply(
        roles=PAIR | {"decode": {"replicas": 2, "kubernetes": {"pod": {"tolerations": tolerations}}}}
    )

    def has(wanted):
        pods = here.cluster.pods("decode")
        return len(pods) == 2 and all(pod["spec"].get("tolerations") == wanted for pod in pods)

    await here.until(lambda: has(tolerations))
    await here.serves()
    assert here.names("prefill") == before
    await here.apply()
    await here.until(lambda: has(None))
    await here.serves()


@given_by("site")
async def test_what_the_graph_loses_goes_with_its_objects(here):
    """A role, the pool of a gateway, and the pod of a planner."""
    options = {"image": "r/penstock:1", "gateway": "public"}
    await here.up(model="o/m", options=options, planner={"max_workers": 4})
    assert here.objects("inference.networking.k8s.io/inferencepools").keys() == {"chat"}
    assert here.objects("gateway.networking.k8s.io/httproutes").keys() == {"chat"}
    parts = {"chat-frontend", "chat-prefill", "chat-decode", "chat-picker", "chat-planner"}
    assert here.objects("apps/deployments").keys() == parts
    assert (await here.status())["workers"] == "3/3", "planner and picker are none"
    await here.apply(model="o/m", roles={"aggregated": {"replicas": 1}})
    await here.until(lambda: here.objects("apps/deployments").keys() == {"chat-frontend", "chat-aggregated"})
    await here.until(lambda: not here.objects("inference.networking.k8s.io/inferencepools"))
    await here.has_pods("decode", 0)
    await here.serves()
    assert [role["metadata"]["name"] for role in (await here.client.list(ROLES)).objects] == [
        "chat-aggregated"
    ]
    assert "chat-decode" not in here.objects("policy/poddisruptionbudgets")


DISK = {"kv": {"disk": {"path": "/var/lib/penstock-kv/blocks", "size": "10GiB"}}}
ONE, WIDE = (
    {"engine": "mock", "replicas": 3},
    {"engine": "mock", "replicas": 3, "nodes": 2, "tensor_parallel": 2},
)
GPU = {"engine": "vllm", "hardware": "h100", "replicas": 3}


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ({"aggregated": ONE}, {"aggregated": ONE | DISK}, 3),
        pytest.param({"aggregated": ONE | DISK}, {"aggregated": ONE}, 3, marks=pytest.mark.nightly),
        ({"aggregated": ONE}, {"aggregated": WIDE}, 3),
        pytest.param({"aggregated": WIDE}, {"aggregated": ONE}, 6, marks=pytest.mark.nightly),
        pytest.param({"aggregated": ONE}, PAIR, 3, marks=pytest.mark.nightly),
        ({"aggregated": GPU}, {"aggregated": GPU | DISK}, 2),
        ({"aggregated": GPU}, {"aggregated": GPU | DISK | {"replicas": 5}}, 3),
        ({"aggregated": GPU | {"replicas": 1}}, {"aggregated": GPU | DISK | {"replicas": 1}}, 1),
        ({"aggregated": GPU}, {"prefill": GPU, "decode": GPU}, 2),
    ],
)  # fmt: skip
@given_by("site")
async def test_an_old_workload_goes_only_as_the_new_one_is_ready(here, before, after, kept):
    """On GPUs one old pod makes room for the first new one, unless it is the last."""
    await here.client.create(DEFINITIONS, definition())
    await here.up(model="o/m", roles=before)
    old = here.names("aggregated")
    here.cluster.troubles = dict.fromkeys(after, "unschedulable")
    await here.apply(model="o/m", roles=after)
    await here.says("Degraded", "Unschedulable")
    await here.until(lambda: len(old & here.names("aggregated")) == kept)
    for _ in range(10):
        await here.until(lambda: True)
    assert len(old & here.names("aggregated")) == kept
    assert (await here.condition("Ready"))["status"] == "True"
    assert (await here.condition("Progressing"))["status"] == "True"
    budgets = {"chat-aggregated", *(f"chat-{role}" for role in after)}
    assert budgets <= here.objects("policy/poddisruptionbudgets").keys()
    here.cluster.troubles = {}
    await here.serves()
    await here.until(lambda: not old & here.names())
    await here.serves()


@given_by("site")
async def test_a_change_that_a_workload_cannot_take_is_said_and_its_number_counts(here):
    """A volume keeps its size, and a StatefulSet cannot become a LeaderWorkerSet of the same name."""
    await here.client.create(DEFINITIONS, definition())
    options = {"image": "r/penstock:2"}
    await here.up(roles={"aggregated": ONE | DISK})
    old = here.names("aggregated")
    larger = {"kv": {"disk": {"path": "/var/lib/penstock-kv/blocks", "size": "20GiB"}}}
    for roles, said in (
        (ONE | larger, "a volume of kv.disk keeps its size"),
        (WIDE, "a StatefulSet of this name is there"),
    ):
        await here.apply(roles={"aggregated": roles}, options=options)
        assert "kubectl delete statefulset" in await here.says("Degraded", said)
        await here.until(lambda: "r/penstock:2" in here.images())
        assert old <= here.names("aggregated")
        assert (await here.condition("Ready"))["status"] == "True"
    await here.apply(roles={"aggregated": ONE | larger}, options=options)
    await here.scale("chat-aggregated", 4)
    await here.has_pods("aggregated", 4)
    await here.client.delete(STATEFUL_SETS, "chat-aggregated")
    await here.serves()
    assert here.images() == {"r/penstock:2"}
    assert len(here.cluster.pods("aggregated")) == 4


@given_by("site")
async def test_a_graph_that_names_no_image_keeps_the_one_that_runs(here):
    """So another release of the operator, whose own image is another, rolls nothing."""
    await here.up(options={"image": "r/penstock:of-the-last-release"})
    pods = here.names()
    await here.apply(options={"network_policy": False})
    await here.serves()
    assert here.names() == pods


@given_by("site")
async def test_scaling_a_role_scales_its_pods_and_stays(here):
    await here.up()
    await here.scale("chat-decode", 4)
    await here.has_pods("decode", 4)
    await here.up(block_size=32)
    assert len(here.cluster.pods("decode")) == 4, "the graph's number did not change"
    await here.apply(roles=PAIR | {"decode": {"replicas": 3}})
    await here.has_pods("decode", 3)
    await here.scale("chat-decode", 0)
    message = await here.says("Ready", "NoWorkers", status="False")
    assert "no worker of decode is ready" in message


@given_by("site")
async def test_the_autoscaler_of_the_example_owns_the_number_within_its_bounds(here):
    kubernetes_validate.validate(AUTOSCALER, "1.37", strict=True)
    assert f"`{METRIC}`" in (ROOT / "docs" / "metrics.md").read_text()
    await here.up()
    await here.client.create(AUTOSCALERS, AUTOSCALER)
    for requests, workers in ((200.0, 7), (210.0, 7), (1000.0, 8), (0.0, 1)):
        here.cluster.metrics = {METRIC: requests}
        await here.has_pods("decode", workers)
        await here.serves()
    await here.apply(roles={"prefill": {"replicas": 2}, "decode": {"replicas": 5}})
    await here.has_pods("prefill", 2)
    await here.serves()
    assert len(here.cluster.pods("decode")) == 1, "the graph yields"
    assert await here.parts("scaledBy") == {"frontend": "", "prefill": "", "decode": "chat-decode"}


@given_by("site")
async def test_an_autoscaler_of_the_pods_themselves_is_left_alone_too(here):
    await here.up()
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat-decode"}
    spec = {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 8}
    body = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "keda"}}
    await here.client.create(AUTOSCALERS, body | {"spec": spec})

    async def is_known():
        return (await here.parts("scaledBy"))["decode"] == "keda"

    await here.until(is_known)
    await here.client.patch(DEPLOYMENTS, "chat-decode", {"spec": {"replicas": 5}}, "scale")
    await here.has_pods("decode", 5)
    await here.up(block_size=32)
    assert len(here.cluster.pods("decode")) == 5


@given_by("site")
async def test_a_role_that_answers_for_servers_has_one_pod_however_it_is_scaled(here):
    args = {"url": ["http://vllm-0:8000", "http://vllm-1:8000"]}
    graph = {"roles": {"aggregated": {"engine": {"name": "openai", "args": args}}}, "model": "o/m"}
    await here.up(**graph)
    await here.scale("chat-aggregated", 3)
    await here.up(**graph, block_size=32)
    assert len(here.cluster.pods("aggregated")) == 1, "a second would count the servers again"
    assert here.objects("apps/deployments")["chat-aggregated"]["spec"]["replicas"] == 1


@given_by("site")
async def test_the_pod_that_the_planner_names_ends_first_and_an_autoscaler_is_told_to_the_planner(here):
    await here.up()
    first, second = sorted(here.names("decode"))
    await here.client.patch(ROLES, "chat-decode", {"spec": {"replicas": 1, "leaving": [first]}})
    await here.until(lambda: here.names("decode") == {second})
    await here.client.patch(ROLES, "chat-decode", {"spec": {"replicas": 2}})
    await here.has_pods("decode", 2)

    def mark():
        annotations = here.objects("pods")[second]["metadata"].get("annotations") or {}
        return annotations.get(reconciler.DELETION_COST)

    for leaving, wanted in (([second], reconciler.FIRST_TO_END), ([], None)):
        await here.client.patch(ROLES, "chat-decode", {"spec": {"leaving": leaving}})
        await here.until(lambda wanted=wanted: mark() == wanted)

    async def owner():
        return (await here.client.get(ROLES, "chat-decode"))["status"].get("scaledBy")

    async def is_owned():
        return await owner() == "chat-decode"

    async def is_free():
        return await owner() == ""

    await here.client.create(AUTOSCALERS, AUTOSCALER)
    await here.until(is_owned)
    await here.client.delete(AUTOSCALERS, "chat-decode")
    await here.until(is_free)


@given_by("site")
async def test_a_graph_that_no_pod_could_have_is_said_and_what_runs_stays(here, tmp_path, monkeypatch):
    """No file of the operator's own disk is read: not a model beside it, not a profile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    secret = tmp_path / "token"
    secret.write_text("bearer-token-of-the-operator")
    profile = f"spec.graph.roles.aggregated.profile: {secret}: would be a file of the operator's disk"
    await here.up(model="org/model")
    before, configuration = here.names(), here.objects("configmaps")
    for graph, said in (
        ({"worker": {"own_cores": True}}, "worker.own_cores"),
        ({"model": "./org/model"}, "model: ./org/model: is relative to a directory"),
        ({"roles": {"aggregated": {"replicas": 1, "profile": str(secret)}}}, profile),
    ):
        await here.apply(**{"model": "org/model"} | graph)
        assert said in await here.says("Degraded", said)
        condition = await here.condition("Ready")
        assert (condition["status"], condition["reason"]) == ("True", "Serving"), "requests are answered"
    assert here.names() == before
    assert here.objects("configmaps") == configuration
    await here.up(model="org/model")


@given_by("site")
async def test_a_graph_at_which_the_operator_fails_stops_no_other(here, monkeypatch):
    of = Desired.of

    def fails(body, images):
        if body["metadata"]["name"] == "odd":
            raise FileNotFoundError(f"no such file: {body['metadata']['resourceVersion']}")
        return of(body, images)

    monkeypatch.setattr(Desired, "of", fails)
    await here.apply("odd")
    assert "FileNotFoundError" in await here.says("Degraded", "OperatorFailed", name="odd")
    await here.up()
    monkeypatch.setattr(Desired, "of", of)
    await here.says("Degraded", "", status="False", name="odd")


NEEDED = {"serviceaccounts", "roles", "rolebindings", "configmaps"}
REFUSED = ["configmaps", "services", "networkpolicies", "deployments"]
AT_NIGHT = ["serviceaccounts", "roles", "rolebindings", "poddisruptionbudgets", "penstockroles"]


@pytest.mark.parametrize(
    "plural", [*REFUSED, *(pytest.param(plural, marks=pytest.mark.nightly) for plural in AT_NIGHT)]
)
@given_by("site")
async def test_a_refused_object_is_said_and_the_rest_applied_policies_first(here, plural):
    """Pods wait for what they need, and for nothing else."""
    await here.until(lambda: here.server.store.all(here.cluster.kind("configmaps")))  # the operator's claim
    here.server.forbidden.add(("create", plural))
    await here.apply()
    message = await here.says("Degraded", "ApplyFailed")
    assert plural in message
    assert "is forbidden" in message
    assert ("lacks" in message) == (plural in NEEDED)
    kinds = {
        resource.plural: f"{resource.group}/{resource.plural}".removeprefix("/")
        for resource in (*KEPT, DEPLOYMENTS)
    }
    lacking = {each for each, kind in kinds.items() if not here.objects(kind)}
    others = {"deployments"} if plural in NEEDED else set()
    if plural == "roles":
        others.add("rolebindings")  # nobody binds a role that is not there
    assert lacking == {plural, *others} & kinds.keys()
    asked = [path.split("/")[-2] for verb, path in here.server.requests if verb == "patch"]
    assert plural in NEEDED or asked.index("networkpolicies") < asked.index("deployments")
    here.server.forbidden.clear()
    await here.serves()


@given_by("site")
async def test_a_passing_refusal_is_tried_again_and_nobodys_to_act_on(here):
    busy = Faults(token="operator-token", too_many=0.3, retry_after_s=0, unavailable=0.2)
    here.server.faults = busy
    await here.apply()
    await here.until(lambda: busy.count > 10)
    here.server.faults = Faults()
    await here.serves()
    kind = here.server.store.kinds.find(GRAPHS.group, GRAPHS.version, GRAPHS.plural)
    written = [event.body.get("status", {}) for event in here.server.store.history if event.kind == kind.key]
    assert "Serving" in {status.get("summary") for status in written}
    assert "ApplyFailed" not in {status.get("summary") for status in written}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
@given_by("site")
async def test_faults_of_the_api_server_end_in_what_is_wanted(here, seed):
    rng = random.Random(seed)
    here.server.faults = Faults(
        rng, error=0.1, too_many=0.05, retry_after_s=0, drop=0.05, drop_watch=0.1, compact_watch=0.03
    )
    for _ in range(4):
        options = {"image": f"r/penstock:{rng.randrange(9)}"}
        try:
            await here.apply(block_size=rng.choice([16, 32]), options=options)
        except Exception:  # noqa: BLE001 - the test's own calls fail, too
            continue
        asked = len(here.server.requests)
        await here.until(lambda: len(here.server.requests) > asked + 5)  # noqa: B023 - called at once
    await here.until(lambda: here.server.faults.count > 3)
    here.server.faults = Faults()
    await here.up(block_size=64)
    (graph,) = here.objects("configmaps").values()
    assert "block_size: 64" in graph["data"]["graph.yaml"]
