"""What no pod, container or job could have, and flags that are wrong: each is a line that names the setting."""

from pathlib import Path

import pytest
import yaml

from penstock import cli
from penstock.cli.render import manifest
from penstock.core.errors import ConfigError
from penstock.deploy.manifests.options import RenderOptions
from penstock.graph import build

VLLM = {"engine": "vllm", "hardware": "h100", "tensor_parallel": 4, "replicas": 2}
MODEL = {"model": "o/m"}
ETCD = {"discovery": "etcd", "urls": ["http://etcd:2379"]}
PODS_PLANNER = {"runtime": ETCD, "planner": {"scales": "pods", "address": "tcp://a:1"}}


def aggregated(**role: object) -> dict:
    return {"roles": {"aggregated": role}}


def refusal(target: str, changes: dict, options: dict) -> list[str]:
    graph = build({"name": "chat", "model": "demo", "roles": {"aggregated": {"engine": "mock"}}} | changes)
    with pytest.raises(ConfigError) as caught:
        manifest(target, graph, RenderOptions.model_validate(options))
    return caught.value.message.splitlines()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"name": "My_Chat"}, "name: My_Chat: objects of Kubernetes are named after it, so it must be up to 40 small letters"),
        ({"name": "c" * 41}, "name: " + "c" * 41),
        ({"name": "default"}, "name: default: pods' ServiceAccount has this name"),
        ({"runtime": {"hub": "tcp://10.0.0.1:7400"}}, "runtime.hub: tcp://10.0.0.1:7400: pods have addresses of their own"),
        ({"runtime": {"listen": "tcp://10.0.0.1:0"}}, "runtime.listen: tcp://10.0.0.1:0: pods have addresses"),
        ({"frontend": {"host": "10.0.0.7"}}, "frontend.host: 10.0.0.7: no pod has this address; leave it out"),
        ({"frontend": {"port": 80}}, "frontend.port: 80: needs root"),
        ({"frontend": {"port": 7401}}, "frontend.port: 7401: is a port that pods use otherwise"),
        ({"frontend": {"access_log": "/var/log/p.log"}}, "frontend.access_log: /var/log/p.log: a pod's lines go to stderr"),
        ({"frontend": {"batches": {"directory": "/b"}}}, "frontend.batches.directory: /b: no pod has it; mount its directory by"),
        ({"regions": [{"name": "eu", "urls": ["http://127.0.0.1:8000"]}]}, "regions.eu.urls.0: http://127.0.0.1:8000: each pod has a loopback address"),
        ({"regions": [{"name": "eu", "urls": ["https://eu"], "api_key_file": "/k/eu"}]}, "regions.eu.api_key_file: /k/eu: no pod has it; mount its directory by"),
        ({"regions": [{"name": "eu", "urls": ["https://eu"], "tls": {"authority": "/t/ca.pem"}}]}, "regions.eu.tls.authority: /t/ca.pem: no pod has it"),
        ({"worker": {"own_cores": True}}, "worker.own_cores: true: a pod has the cores"),
        ({"worker": {"kv_transfer": {"transfer": {"secret": "hunter2hunter2"}}}}, "worker.kv_transfer.transfer.secret: (not shown)"),
        ({"tracing": {}}, "tracing.endpoint: http://127.0.0.1:4318: each pod has a loopback address of its own"),
        ({"runtime": ETCD | {"urls": ["http://localhost:2379"]}}, "runtime.urls.0: http://localhost:2379: each pod has a loopback"),
        ({"runtime": ETCD | {"registry_credentials_file": "/etc/a"}}, "runtime.registry_credentials_file: /etc/a: no pod has it"),
        ({"model": "./llama"}, "model: ./llama: is relative to a directory of this machine"),
        ({"model": "llama-3.1-8b"}, "model: 'llama-3.1-8b' is a shape for penstock simulate"),
        (aggregated(replicas=0), "roles: have no worker at all"),
        (aggregated(engine="mock", replicas=10**9), "roles.aggregated.replicas: 1,000,000,000 workers, but a router knows at most 1,024"),
        (aggregated(engine="mock", locations=[{"zone": "eu west"}]), "roles.aggregated.locations.0.zone: 'eu west': nodes are chosen by it"),
        (aggregated(engine="mock", locations=[{"zone": "a"}, {"zone": "b"}]), "roles.aggregated.locations: 2 places"),
        (MODEL | aggregated(**VLLM, engine_args={"hf_token": "hf_x"}), "roles.aggregated.engine_args.hf_token: (not shown)"),
        (MODEL | aggregated(**VLLM, engine_args={"download_dir": "/data"}), "roles.aggregated.engine_args.download_dir: /data: no pod"),
        (MODEL | aggregated(**VLLM | {"tensor_parallel": 16}), "roles.aggregated: 16 GPUs on a node: a machine with h100 has 8; set roles.aggregated.nodes: 2"),
        (aggregated(engine="openai", engine_args={"url": ["http://127.0.0.1:8001"]}), "roles.aggregated.engine_args.url.0: http://127.0.0.1:8001: each pod has a loopback"),
        ({"planner": {}}, "planner: (a mapping): nothing here would start the pods"),
        (PODS_PLANNER, "planner.scales: pods:"),
    ],
)  # fmt: skip
def test_what_no_pod_could_have(changes: dict, line: str) -> None:
    lines = refusal("kubernetes", changes, {})
    assert any(each.startswith(line) for each in lines), lines
    assert not any("hunter2" in each or "hf_x" in each for each in lines)


@pytest.mark.parametrize(
    ("target", "options", "changes", "line"),
    [
        ("slurm", {}, {"kubernetes": {}}, "kubernetes: (a mapping): --target slurm makes no pods; leave it out, as by --set"),
        ("slurm", {}, aggregated(kubernetes={"pod": {"priorityClassName": "high"}}), "roles.aggregated.kubernetes: "),
        ("slurm", {}, {"model": "llama-3.1-8b"}, "model: 'llama-3.1-8b' is a shape for penstock simulate"),
        ("slurm", {"nodes": 3}, {}, "--nodes 3: 2 of them would run nothing"),
        ("slurm", {"nodes": 1}, MODEL | aggregated(**VLLM | {"replicas": 3}), "--nodes 1: roles.aggregated: worker 3 of 3 needs 4 GPUs"),
        ("slurm", {"nodes": 3}, MODEL | aggregated(**VLLM | {"tensor_parallel": 16, "nodes": 2}), "--nodes 3: roles.aggregated: worker 2 of 2 needs 8 GPUs on each of 2 nodes"),
        ("slurm", {"gpus_per_node": 2}, MODEL | aggregated(**VLLM), "roles.aggregated: 4 GPUs on a node, and a node has 2"),
        ("slurm", {}, MODEL | aggregated(**VLLM | {"hardware": "l40s", "tensor_parallel": 1}), "roles.aggregated.hardware: l40s: nodes with it differ"),
        ("slurm", {}, {"runtime": {"discovery": "kubernetes"}}, "runtime.discovery: kubernetes: nodes of Slurm are no pods"),
        ("slurm", {}, PODS_PLANNER, "planner.scales: pods:"),
        ("slurm", {}, {"runtime": {"listen": "tcp://10.0.0.1:0"}}, "runtime.listen: tcp://10.0.0.1:0: nodes are known when the job runs"),
        ("slurm", {}, aggregated(engine="mock", locations=[{"zone": "a"}, {"zone": "b"}]), "roles.aggregated.locations: 2 places"),
        ("kubernetes", {"gateway": "public"}, aggregated(), "gateway: the picker reads the tokenizer"),
        ("kubernetes", {"gateway": "public"}, MODEL | {"served_name": "chat"}, "served_name: chat: the picker knows the model as o/m"),
        ("kubernetes", {"gateway": "public"}, MODEL | {"frontend": {"tls": {"certificate": "/k/c", "key": "/k/k"}}}, "frontend.tls: gateways speak plain HTTP"),
    ],
)  # fmt: skip
def test_what_no_other_target_could_have(target: str, options: dict, changes: dict, line: str) -> None:
    lines = refusal(target, changes, options)
    assert any(each.startswith(line) for each in lines), lines


@pytest.mark.parametrize(
    "flags",
    [
        "--mount keys=secret:x",
        "--mount /etc=secret:x",
        "--mount /a/../etc=secret:x",
        "--mount /keys=vault:x",
        "--mount /keys=secret:Not_A_Name",
        "--mount /k=secret:x --mount /k=secret:y",
        "--cache 200Gi",
        "--cache size:200",
        "--image a,b",
        "--namespace Prod",
        "--secret {{.Values.x}}",
        "--nodes 2",
        "--nodes 0 --target slurm",
        "--gateway gate --target slurm",
        "--no-network-policy --target slurm",
        "--mount /keys=host:/keys --target slurm",
        "--cache claim:weights --target slurm",
        "--egress-port 16443 --target slurm",
    ],
)
def test_wrong_flags_are_one_line(flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(yaml.safe_dump({"name": "chat", "model": "demo"}))
    words = flags.split()
    assert cli.main(["render", str(path), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"penstock: {words[0]}"), line
