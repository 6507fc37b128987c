"""`penstock graph render`: what is printed, and what is refused. Recipes have recorded renders in tests/docs."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.demo import MODEL_DIR

VLLM = """
model: org/model
context_length: 4096
roles:
  aggregated: {replicas: 2, engine: {name: vllm, args: {seed: 3}}, hardware: h100, tensor_parallel: 2}
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "graph.yaml"
    path.write_text(text)
    return str(path)


def rendered(capsys: pytest.CaptureFixture[str], path: str, *flags: str) -> Any:
    assert cli.main(["graph", "render", "--json", path, *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_worker_has_gpus_of_its_own_and_equal_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = rendered(capsys, write(tmp_path, VLLM))
    first, second = document["workers"]
    assert [first["name"], second["name"]] == ["worker-1", "worker-2"]
    assert (first["devices"], second["devices"]) == ([0, 1], [2, 3])
    assert first["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert first["arguments"] == second["arguments"]
    assert (first["arguments"]["seed"], first["arguments"]["max_model_len"]) == (3, 4096)
    assert "kv_transfer_config" not in first["arguments"], "aggregated workers transfer nothing"


def test_a_model_that_is_here_gives_what_the_graph_leaves_open(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    roles = "{prefill: {engine: vllm, hardware: h100}, decode: {engine: vllm, hardware: h100}}"
    here = rendered(capsys, write(tmp_path, f"{{model: {MODEL_DIR}, block_size: 32, roles: {roles}}}"))
    prefill, decode = (worker["arguments"] for worker in here["workers"])
    assert (prefill["model"], here["notes"]) == (str(MODEL_DIR), [])
    assert (
        prefill["max_model_len"]
        == json.loads((MODEL_DIR / "config.json").read_text())["max_position_embeddings"]
    )
    assert prefill["max_num_batched_tokens"] > 0
    assert "max_num_batched_tokens" not in decode
    elsewhere = rendered(capsys, write(tmp_path, f"{{model: org/model, roles: {roles}}}"))
    assert "max_model_len" not in elsewhere["workers"][0]["arguments"]
    (note,) = elsewhere["notes"]
    assert note == (
        "model: org/model is not on this machine: a start gives engines the directory of its download, and reads"
        " context_length and roles.prefill.max_batch_tokens from its config.json"
    )


def test_engines_of_penstock_and_of_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cases = {
        "paged": ("", "penstock.engine.paged.PagedConfig", {"device": "cpu", "block_size": 16}),
        "mock": ("kv_blocks: 99", "penstock.engine.mock", {"num_blocks": 99, "context_length": 512}),
        "json:loads": ("engine_args: {a: 1}", "json:loads(EngineSpec)", {"args": {"a": 1}, "device": "cpu"}),
    }
    for engine, (more, call, expected) in cases.items():
        text = f"model: demo\ncontext_length: 512\nroles: {{aggregated: {{engine: '{engine}', {more}}}}}"
        (worker,) = rendered(capsys, write(tmp_path, text))["workers"]
        assert (worker["call"], worker["devices"]) == (call, [])
        assert expected.items() <= worker["arguments"].items()
        assert "hash_key" not in worker["arguments"], "a secret"


def test_each_worker_of_running_servers_has_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = "{url: [http://a:1, http://b:2], kv_events: [tcp://a:3, tcp://b:4]}"
    text = f"model: demo\nroles: {{aggregated: {{engine: {{name: openai, args: {args}}}}}}}"
    workers = rendered(capsys, write(tmp_path, text))["workers"]
    assert [worker["arguments"] for worker in workers] == [
        {"url": ["http://a:1"], "kv_events": ["tcp://a:3"]},
        {"url": ["http://b:2"], "kv_events": ["tcp://b:4"]},
    ]


def test_what_serve_would_refuse_is_said_beside(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, flag = write(tmp_path, VLLM), "roles.aggregated.replicas=5"
    note = "penstock serve refuses it: roles.aggregated: worker 5 of 5 would get GPUs 8 to 9, but a machine with h100"
    assert rendered(capsys, path, "--set", flag)["notes"][0].startswith(note)
    assert cli.main(["graph", "render", path, "--set", flag]) == 0
    assert capsys.readouterr().out.startswith(f"# {note}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model: m\nroles: {aggregated: {engine: {args: {}}}}", "engine: must be a name, or a mapping with name"),
        ("model: llama-3.1-70b", "is a shape for penstock simulate and penstock plan, without weights"),
        (VLLM.replace("seed: 3", "block_size: 3"), "engine_args: block_size is set by the graph's block_size; set that instead"),
        (VLLM.replace("seed: 3", "kv_transfer_config: x").replace("hardware", "kv: {host: 8GiB}, hardware"), "kv_transfer_config: must be a mapping"),
        (VLLM.replace("seed: 3", "").replace("vllm", "sglang").replace("{}", "{tp_size: 2}"), "set tensor_parallel"),
        (VLLM.replace("replicas: 2", "replicas: 1025"), "1,025 workers, but a router knows at most 1,024"),
        (VLLM.replace("h100", "cpu").replace("vllm", "sglang"), "engine sglang: runs on NVIDIA GPUs alone"),
        (VLLM.replace("h100", "cpu"), "block_size: vLLM on CPUs needs a multiple of 32, got 16; set block_size: 32"),
        (VLLM.replace("seed: 3", "seed: {of: 2024-01-01}"), "got datetime.date(2024, 1, 1); write it as text in quotes"),
        (VLLM.replace("seed: 3", "seed: .nan"), "engine_args: must be of text, finite numbers, true"),
        (VLLM.replace("args: {seed: 3}", "data_parallel: 2").replace("vllm", "trtllm"), "so tensor_parallel must be 1, got 2"),
        (None, "none.yaml: no such file or directory"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, why: str
) -> None:
    path = str(tmp_path / "none.yaml") if text is None else write(tmp_path, text)
    assert cli.main(["graph", "render", path]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert why in line


def test_a_worker_of_several_nodes_has_the_gpus_of_its_first_and_names_for_what_a_start_finds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wide = VLLM.replace("tensor_parallel: 2", "tensor_parallel: 16, nodes: 2").replace("replicas: 2, ", "")
    document = rendered(capsys, write(tmp_path, wide))
    (worker,) = document["workers"]
    assert worker["devices"] == list(range(8))
    found = {
        name: worker["arguments"][name] for name in ("nnodes", "node_rank", "master_addr", "master_port")
    }
    assert found == {
        "nnodes": 2,
        "node_rank": 0,
        "master_addr": "<leader>",
        "master_port": "<leader's port>",
    }
    assert any("each node of a worker runs `penstock up`" in note for note in document["notes"])
