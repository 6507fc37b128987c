"""Workers over several nodes: a LeaderWorkerSet that its schema takes, pods that the command takes, nodes of Slurm, and what is refused."""

import json
import subprocess
from pathlib import Path

import pytest

from penstock.cli import make_parser
from penstock.deploy.manifests.kubernetes import pod_templates
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.slurm import slurm_script
from penstock.deploy.supervisor.local_part import LocalPart, followed_role
from penstock.graph import Overrides, build, load
from tests.support.kubernetes import schema
from tests.support.kubernetes.problems import Refused
from tests.support.rendered import ROOT, by_kind, objects_of, validate

SCHEMA = json.loads((ROOT / "tests" / "data" / "leader_worker_set.json").read_text())
ROLE = {"engine": "vllm", "hardware": "h100", "nodes": 2, "tensor_parallel": 16, "replicas": 3}


def graph(**changes):
    return build({"name": "big", "model": "org/model", "roles": {"aggregated": ROLE | changes}})


def workload(**changes):
    (made,) = by_kind(objects_of(graph(**changes)), "LeaderWorkerSet").values()
    return made


def test_a_group_for_each_worker_is_one_that_the_released_schema_takes() -> None:
    made = workload()
    schema.check(SCHEMA, made)
    spec = made["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    for version in ("1.31", "1.37"):
        for template in pod_templates(made):
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "p"} | template["metadata"],
                "spec": template["spec"],
            }
            validate(pod, version)  # fmt: skip
    for each in objects_of(graph()):
        if each is not made and each["kind"] != "LeaderWorkerSet":
            validate(each, "1.37")
    spec["leaderWorkerTemplate"]["restartPolicy"] = "Never"
    with pytest.raises(Refused):
        schema.check(SCHEMA, made)


def test_each_pod_has_the_gpus_of_its_node_and_a_command_that_penstock_takes(tmp_path: Path) -> None:
    objects = objects_of(graph())
    (made,) = by_kind(objects, "LeaderWorkerSet").values()
    (config,) = by_kind(objects, "ConfigMap").values()
    (tmp_path / "graph.yaml").write_text(config["data"]["graph.yaml"])
    given = {"POD_IP": "10.1.2.3", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "big-0.big.default"}
    read = []
    for template in pod_templates(made):
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        command, _, *words = container["args"]
        for name, value in given.items():
            words = [word.replace(f"$({name})", value) for word in words]
        options = make_parser().parse_args([command, str(tmp_path / "graph.yaml"), *words])
        loaded = load(options.file, Overrides([*options.set, f"runtime.leader={options.leader}"]))
        part = LocalPart.parse(options.part, loaded.roles.present())
        read.append((options.node_rank, loaded.runtime.leader))
        if options.node_rank:
            assert followed_role(loaded, part, options.node_rank) == "aggregated"
        else:
            assert part.of(loaded.roles.present())[next(iter(loaded.roles.present()))].replicas == 1
            assert loaded.runtime.listen == "tcp://10.1.2.3:7401"
    assert read == [(0, "tcp://10.1.2.3:7405"), (1, "tcp://big-0.big.default:7405")]


def test_pods_of_a_group_reach_each_other_at_any_port_and_a_drain_takes_one_pod() -> None:
    objects = objects_of(graph())
    policy = by_kind(objects, "NetworkPolicy")["big-aggregated-nodes"]["spec"]
    own = policy["podSelector"]
    assert policy["ingress"] == [{"from": [{"podSelector": own}]}]
    assert policy["egress"] == [{"to": [{"podSelector": own}]}]
    budget = by_kind(objects, "PodDisruptionBudget")["big-aggregated"]["spec"]
    for template in pod_templates(by_kind(objects, "LeaderWorkerSet")["big-aggregated"]):
        labels = template["metadata"]["labels"].items()
        assert own["matchLabels"].items() <= labels
        assert budget["selector"]["matchLabels"].items() <= labels


def test_a_group_is_kept_in_one_zone_and_groups_are_spread() -> None:
    leader, follower = pod_templates(workload())
    for template in (leader, follower):
        (term,) = template["spec"]["affinity"]["podAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
        assert term["podAffinityTerm"]["matchLabelKeys"] == ["leaderworkerset.sigs.k8s.io/group-key"]
    (spread,) = leader["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert "topologySpreadConstraints" not in follower["spec"]


def test_a_role_of_one_node_stays_a_deployment() -> None:
    assert not by_kind(objects_of(graph(nodes=1, tensor_parallel=8)), "LeaderWorkerSet")


@pytest.mark.needs("shellcheck")
def test_nodes_of_slurm_run_a_worker_together(tmp_path: Path) -> None:
    text = slurm_script(graph(replicas=2), RenderOptions())
    assert 'parts=("frontend,aggregated=1" "aggregated=1" "aggregated=1" "aggregated=1")' in text
    groups = text[text.index("groups=(") :].split(")")[0].splitlines()[1:]
    assert [line.strip().strip('"') for line in groups] == [
        "--leader tcp://${nodes[0]}:7405",
        "--leader tcp://${nodes[0]}:7405 --node-rank 1",
        "--leader tcp://${nodes[2]}:7405",
        "--leader tcp://${nodes[2]}:7405 --node-rank 1",
    ]
    path = tmp_path / "job.sh"
    path.write_text(text)
    done = subprocess.run(
        ["shellcheck", "--exclude=SC2016", path], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
