"""Batch scripts of Slurm: what bash and shellcheck say, and where workers run. A test with processes is in tests/e2e/hosts."""

import re
import subprocess
from pathlib import Path

import pytest

from penstock import cli
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.slurm import slurm_script
from penstock.graph import build, load
from tests.support.rendered import ROOT

pytestmark = pytest.mark.needs("shellcheck")

VLLM = {"engine": "vllm", "hardware": "h100", "tensor_parallel": 4, "replicas": 3}


def script(options=None, **changes) -> str:
    return slurm_script(
        build({"name": "job", "model": "demo"} | changes), RenderOptions.model_validate(options or {})
    )


def parts(text: str) -> list[str]:
    (line,) = re.findall(r"(?m)^parts=\((.*)\)$", text)
    return re.findall(r'"([^"]*)"', line)


def check(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True)
    # SC2016: what is in single quotes is for a shell of the node.
    done = subprocess.run(
        ["shellcheck", "--exclude=SC2016", path], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        ({}, {}, ["frontend,aggregated=1"]),
        ({"nodes": 2}, {"roles": {"aggregated": {"engine": "mock", "replicas": 5}}}, ["frontend,aggregated=3", "aggregated=2"]),
        ({}, {"model": "o/m", "roles": {"aggregated": VLLM}}, ["frontend,aggregated=2", "aggregated=1"]),
        ({}, {"model": "o/m", "roles": {"prefill": VLLM, "decode": VLLM | {"tensor_parallel": 8, "replicas": 1}}},
         ["frontend,prefill=2", "prefill=1", "decode=1"]),
        ({"gpus_per_node": 4}, {"model": "o/m", "roles": {"aggregated": VLLM}}, ["frontend,aggregated=1", "aggregated=1", "aggregated=1"]),
    ],
)  # fmt: skip
def test_workers_are_dealt_out_to_nodes(
    options: dict, changes: dict, expected: list[str], tmp_path: Path
) -> None:
    text = script(options, **changes)
    assert parts(text) == expected
    assert f"#SBATCH --nodes={len(expected)}\n" in text
    gpus = options.get("gpus_per_node", 8)
    assert (f"#SBATCH --gpus-per-node={gpus}\n" in text) is ("model" in changes)
    assert ("--join" in text) is (len(expected) > 1)
    assert ("VLLM_NIXL_SIDE_CHANNEL_HOST" in text) is ("model" in changes)
    check(text, tmp_path)


def test_a_registry_of_the_graph_needs_no_hub(tmp_path: Path) -> None:
    text = script(
        {"nodes": 2},
        runtime={"discovery": "etcd", "urls": ["http://etcd:2379"]},
        roles={"aggregated": {"engine": "mock", "replicas": 2}},
    )
    assert "--join" not in text
    assert "7400" not in text
    check(text, tmp_path)


def test_text_of_the_graph_is_not_run(tmp_path: Path) -> None:
    hostile = "$(touch x) `touch x` ' \" \nGRAPH\n"
    text = script(served_name=hostile)
    check(text, tmp_path)
    (end, body) = re.findall(r"(?ms)^cat >\"\$graph\" <<'(\w+)'\n(.*?)\n^\1$", text)[0]
    (tmp_path / "graph.yaml").write_text(f"{body}\n")
    assert load(tmp_path / "graph.yaml").served_name == hostile, end


def test_a_planner_runs_on_the_first_node_and_scales_all(tmp_path: Path) -> None:
    roles = {"aggregated": {"engine": "mock", "replicas": 2}}
    text = script({"nodes": 2}, roles=roles, planner={"max_workers": 4})
    assert parts(text) == ["frontend,planner,aggregated=1", "aggregated=1"]
    assert 'first+=(--set "planner.address=tcp://0.0.0.0:7404")' in text
    assert 'others+=(--set "planner.address=tcp://${nodes[0]}:7404")' in text
    check(text, tmp_path)
    hub = {"hub": "tcp://10.0.0.1:7400"}
    for nodes, spans in ((2, True), (1, False)):
        planner = {"max_workers": 4, "address": "tcp://10.0.0.1:7410"}
        text = script({"nodes": nodes}, roles=roles, planner=planner, runtime=hub)
        assert ("planner.address=tcp://0.0.0.0:7410" in text) is spans
        assert "10.0.0.1" not in text, "nodes are known when the job runs"
        check(text, tmp_path)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", str(ROOT / "examples/mock.yaml"), "--target", "slurm", "--nodes", "2"]) == 0
    assert parts(capsys.readouterr().out) == ["frontend,aggregated=2", "aggregated=2"]
