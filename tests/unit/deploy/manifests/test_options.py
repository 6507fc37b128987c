"""What is asked for beside the graph: volumes, images, names; and what of a graph no pod could have."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.deploy.manifests.options import Cache, Mount
from penstock.deploy.manifests.pod_graph import dump, dump_all
from penstock.graph import build
from tests.support.rendered import by_kind, objects_of, pods, validate

BASE = {"name": "chat", "model": "demo"}
VLLM = {"engine": "vllm", "hardware": "h100", "tensor_parallel": 4, "replicas": 2}


def graph(**changes):
    return build(BASE | changes)


def test_gpus_are_asked_for_by_worker() -> None:
    objects = objects_of(graph(model="org/model", roles={"aggregated": VLLM}), gpu_image="registry/cuda:1")
    deployment = by_kind(objects, "Deployment")["chat-aggregated"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/cuda:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    environment = {each["name"]: each for each in container["env"]}
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"]["value"] == "$(POD_IP)"
    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": "chat-secret",
        "key": "hf-token",
        "optional": True,
    }
    names = [each["name"] for each in container["env"]]
    first, then = names.index("POD_IP"), names.index("VLLM_NIXL_SIDE_CHANNEL_HOST")
    assert first < then, "only what stands before is expanded"


def test_a_disk_tier_has_a_volume_of_each_worker() -> None:
    role = {"engine": "paged", "replicas": 2, "kv": {"disk": "/var/lib/kv/blocks:10GiB", "host": "4GiB"}}
    objects = objects_of(graph(roles={"aggregated": role}))
    (stateful,) = by_kind(objects, "StatefulSet").values()
    validate(stateful, "1.37")
    (claim,) = stateful["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "11265Mi"
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    assert {"name": "kv-disk", "mountPath": "/var/lib/kv"} in container["volumeMounts"]
    assert container["resources"]["requests"]["memory"] == "6144Mi"
    assert stateful["spec"]["serviceName"] in by_kind(objects, "Service")
    assert list(yaml.safe_load_all(dump_all(objects))) == objects


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ("pod", {"emptyDir": {}}),
        ("size:200Gi", {"persistentVolumeClaim": {"claimName": "chat-cache"}}),
        ("claim:weights", {"persistentVolumeClaim": {"claimName": "weights"}}),
        ("host:/data/hub", {"hostPath": {"path": "/data/hub", "type": "DirectoryOrCreate"}}),
    ],
)
def test_where_weights_are_kept(cache: str, volume: dict) -> None:
    objects = objects_of(graph(model="org/model"), cache=Cache.read(cache))
    for each in objects:
        validate(each, "1.37")
    for template in pods(objects).values():
        assert {"name": "cache", **volume} in template["spec"]["volumes"]
    assert ("chat-cache" in by_kind(objects, "PersistentVolumeClaim")) is (cache == "size:200Gi")


def test_files_of_the_graph_are_mounted_and_others_are_refused() -> None:
    files = {
        "frontend": {
            "api_key_file": "/etc/keys/tenants.yaml",
            "tls": {"certificate": "/etc/tls/tls.crt", "key": "/etc/tls/tls.key"},
        },
        "model": "/models/llama",
    }
    with pytest.raises(ConfigError) as caught:
        objects_of(graph(**files))
    lines = caught.value.message.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "model", "frontend.api_key_file", "frontend.tls.certificate", "frontend.tls.key",
    ]  # fmt: skip
    assert "mount its directory by --mount /etc/keys=secret:NAME or claim:NAME" in lines[1]
    mounts = [
        Mount.read(text) for text in ("/etc/keys=secret:keys", "/etc/tls=secret:tls", "/models=claim:models")
    ]
    objects = objects_of(graph(**files), mounts=mounts)
    template = pods(objects)["chat-frontend"]
    assert {"name": "mount-2", "persistentVolumeClaim": {"claimName": "models"}} in template["spec"][
        "volumes"
    ]
    (container,) = template["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTP", (
        "the supervisor's port has no certificate"
    )
    for each in objects:
        validate(each, "1.37")


def test_profiles_go_along(tmp_path: Path) -> None:
    profile = Path(__file__).parents[4] / "examples/profiles/8b-h100-bf16-tp1.json"
    role = {"engine": "vllm", "hardware": "h100", "profile": str(profile)}
    (config,) = by_kind(objects_of(graph(model="org/m", roles={"aggregated": role})), "ConfigMap").values()
    assert json.loads(config["data"]["aggregated.profile.json"]) == json.loads(profile.read_text())
    read = yaml.safe_load(config["data"]["graph.yaml"])
    assert read["roles"]["aggregated"]["profile"] == "/etc/penstock/aggregated.profile.json"


def test_servers_elsewhere_have_one_pod_of_all_their_workers() -> None:
    role = {"engine": "openai", "engine_args": {"url": ["http://vllm-0:8001", "http://vllm-1:8001"]}}
    objects = objects_of(graph(roles={"aggregated": role}))
    deployment = by_kind(objects, "Deployment")["chat-aggregated"]
    assert deployment["spec"]["replicas"] == 1
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "aggregated=2" in container["args"]
    policy = by_kind(objects, "NetworkPolicy")["chat-workers"]
    assert any({"protocol": "TCP", "port": 8001} in rule["ports"] for rule in policy["spec"]["egress"])


def test_a_registry_of_the_graph_is_used_and_without_one_workers_are_leases() -> None:
    leases = objects_of(graph())
    (role,) = by_kind(leases, "Role").values()
    assert role["rules"][0]["resources"] == ["leases"]
    (binding,) = by_kind(leases, "RoleBinding").values()
    assert binding["subjects"][0]["name"] in by_kind(leases, "ServiceAccount")
    assert all(each["spec"]["automountServiceAccountToken"] for each in pods(leases).values())
    runtime = {
        "discovery": "etcd", "urls": ["http://etcd:2379"], "events": "nats", "event_urls": ["nats://nats:4222"],
    }  # fmt: skip
    etcd = objects_of(graph(runtime=runtime))
    assert not by_kind(etcd, "Role")
    assert not any(each["spec"]["automountServiceAccountToken"] for each in pods(etcd).values())
    for policy in by_kind(etcd, "NetworkPolicy").values():
        ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())]
        assert {2379, 4222} <= set(ports)
        assert 6443 not in ports


@settings(max_examples=max(10, settings().max_examples // 4))
@given(
    text=st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=60),
    replicas=st.integers(0, 2**40),
)
def test_whatever_a_graph_says_is_written_as_it_is_or_refused(text: str, replicas: int) -> None:
    roles = {"aggregated": {"engine": "mock", "replicas": replicas, "adapters": [text]}}
    try:
        objects = objects_of(
            build(BASE | {"served_name": text, "name": text[:10], "model": "demo", "roles": roles})
        )
    except ConfigError:
        return
    assert list(yaml.safe_load_all(dump_all(objects))) == objects
    (config,) = by_kind(objects, "ConfigMap").values()
    assert yaml.safe_load(config["data"]["graph.yaml"])["served_name"] == text


@given(text=st.text(max_size=80))
def test_any_text_is_written_so_that_it_is_read_back(text: str) -> None:
    try:
        made = dump({"key": text, "block": f"a: {text}\n"})
    except UnicodeEncodeError:
        return
    assert yaml.safe_load(made) == {"key": text, "block": f"a: {text}\n"}
