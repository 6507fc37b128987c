"""A chart against Helm itself, in a process of its own: templates, changed values, values that are refused, and lint."""

import json
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from penstock import cli
from penstock.core.errors import ConfigError
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.targets import write_chart
from penstock.graph import Graph, build
from tests.support.rendered import ROOT, by_kind, example, objects_of, pods

FEW = (
    "examples/mock.yaml",
    "examples/disaggregated.yaml",
    "examples/recipes/llama-3.3-70b-fp8-h100-vllm.yaml",
)


def helm(chart: Path, *values: dict) -> tuple[list[dict], dict]:
    """Render a chart for each of these values; returns the answers, and what lint says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.helm_run", chart],
        input="".join(json.dumps(each) + "\n" for each in values),
        capture_output=True, text=True, check=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    *answers, lint = map(json.loads, done.stdout.splitlines())
    return answers, lint


def objects_in(answer: dict) -> list[dict]:
    return [yaml.safe_load(text) for _, text in sorted(answer["manifests"].items())]


def written(graph: Graph, folder: Path, **options: object) -> Path:
    write_chart(graph, RenderOptions.model_validate(options), folder / "chart")
    return folder / "chart"


@pytest.mark.parametrize("path", FEW)
def test_a_chart_gives_the_objects_of_the_graph(path: str, tmp_path: Path) -> None:
    graph = example(ROOT / path)
    ((answer,), lint) = helm(written(graph, tmp_path), {})
    assert [each for each in lint["messages"] if each["severity"] > 1] == []
    ours, theirs = objects_of(graph), objects_in(answer)
    (config,), (of_chart,) = by_kind(ours, "ConfigMap").values(), by_kind(theirs, "ConfigMap").values()
    read = yaml.safe_load(of_chart["data"]["graph.yaml"])
    assert Graph.model_validate(read) == Graph.model_validate(yaml.safe_load(config["data"]["graph.yaml"]))
    for template in pods(theirs).values():
        assert re.fullmatch(
            r"[0-9a-f]{64}", template["metadata"].pop("annotations")["penstock.dev/graph-checksum"]
        )
    name = config["metadata"]["name"]
    plain = json.loads(json.dumps(ours).replace(name, f"{graph.name}-graph"))
    assert [each for each in theirs if each["kind"] != "ConfigMap"] == [
        each for each in plain if each["kind"] != "ConfigMap"
    ]
    for each in theirs:
        kubernetes_validate.validate(each, "1.37", strict=True)


def test_values_change_pods_or_are_refused(tmp_path: Path) -> None:
    graph = build(
        {"name": "chat", "model": "demo", "roles": {"aggregated": {"engine": "mock", "replicas": 4}}}
    )
    refused = (
        {"graph": {"roles": {"aggregated": {"tensor_parallel": 2}}}},
        {"graph": {"frontend": {"port": 9000}}},
        {"graph": {"roles": {"decode": {"engine": "mock"}}}},
        {"graph": {"tracing": {}}},
        {"replicas": {"aggregated": -1}},
        {"replicas": {"aggregated": "{{ 4 }}"}},
        {"replicas": {"decode": 1}},
        {"image": "a b"},
        {"imagee": "x"},
    )
    taken = (
        {},
        {"replicas": {"aggregated": 7}},
        {"image": "registry/penstock:2", "secret": "other", "graph": {"router": {"policy": "random"}}},
    )
    answers, _ = helm(written(graph, tmp_path), *taken, *refused)
    plain, scaled, changed = (pods(objects_in(answer)) for answer in answers[:3])
    assert plain == scaled, "more pods start no other one again"
    assert [
        by_kind(objects_in(answer), "Deployment")["chat-aggregated"]["spec"]["replicas"]
        for answer in answers[:3]
    ] == [4, 7, 4]
    for name, template in changed.items():
        assert template["metadata"]["annotations"] != plain[name]["metadata"]["annotations"], (
            "another graph is read by new pods"
        )
        (container,) = template["spec"]["containers"]
        assert container["image"] == "registry/penstock:2"
        (reference,) = [
            each["valueFrom"]["secretKeyRef"]
            for each in container["env"]
            if each["name"] == "PENSTOCK_SECRET"
        ]
        assert reference["name"] == "other"
    for values, answer in zip(refused, answers[3:], strict=True):
        assert "error" in answer, values


def test_text_of_the_graph_is_no_template(tmp_path: Path) -> None:
    hostile = '{{ .Values.secret }} {{- fail "x" }} \'" # :'
    graph = build(
        {
            "name": "chat",
            "model": "demo",
            "served_name": hostile,
            "request_plane": {"frame_bytes_max": 1 << 30},
        }
    )
    mounts = [{"path": "/k/{{ .Values.secret }}", "kind": "secret", "name": "keys"}]
    ((answer,), _) = helm(written(graph, tmp_path, mounts=mounts), {})
    (config,) = by_kind(objects_in(answer), "ConfigMap").values()
    read = Graph.model_validate(yaml.safe_load(config["data"]["graph.yaml"]))
    assert read.served_name == hostile
    assert read.request_plane == graph.request_plane, "large numbers stay whole"
    for template in pods(objects_in(answer)).values():
        (container,) = template["spec"]["containers"]
        assert container["volumeMounts"][-1]["mountPath"] == "/k/{{ .Values.secret }}"


def test_only_a_chart_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = str(ROOT / "examples/mock.yaml")
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    assert cli.main(["render", graph, "--target", "helm", "--output", str(other)]) == 2
    assert f"--output: {other}: has files and no Chart.yaml" in capsys.readouterr().err
    for _ in range(2):
        assert cli.main(["render", graph, "--target", "helm", "--output", str(tmp_path / "chart")]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .endswith("a chart of 15 files; helm install NAME " + str(tmp_path / "chart"))
    )
    with pytest.raises(ConfigError, match=r"--output: .*notes\.txt: not a directory"):
        write_chart(example(ROOT / "examples/mock.yaml"), RenderOptions(), other / "notes.txt")


def test_a_second_pod_that_would_count_servers_twice_is_refused(tmp_path: Path) -> None:
    role = {"engine": "openai", "engine_args": {"url": ["http://a:1", "http://b:1"]}}
    chart = written(build({"name": "chat", "model": "o/m", "roles": {"aggregated": role}}), tmp_path)
    ((_, refused), _) = helm(chart, {}, {"replicas": {"aggregated": 2, "frontend": 1}})
    assert "maximum" in refused["error"]
