"""What the command says without starting anything; tests/e2e runs the real one."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from penstock import cli
from penstock.cli import serve
from penstock.demo import MODEL_DIR
from penstock.engine.registry import engine_names
from penstock.graph import Graph, Roles, RoleSpec
from penstock.plan import command as plan_command
from penstock.plan.trial import Processes


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail with exit code 2 and one line."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" or captured.out.startswith("penstock    starting  model ")
    assert captured.err.startswith("penstock: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("penstock: ").strip()


def graph_of(*arguments: str) -> Graph:
    return serve.graph_of(cli.make_parser().parse_args(["serve", *arguments]))


def test_flags_become_a_graph() -> None:
    assert graph_of("m") == Graph(model="m")
    mock = Roles(aggregated=RoleSpec(engine="mock"))
    assert graph_of("--engine", "mock") == Graph(model="demo", roles=mock)
    graph = graph_of(
        "m", "--workers", "3", "--host", "0.0.0.0", "--port", "0", "--frontend-processes", "2", "--policy",
        "least-loaded", "--set", "block_size=32", "--set", "roles.aggregated.kv_blocks=64",
    )  # fmt: skip
    assert (graph.model, graph.block_size) == ("m", 32)
    assert graph.roles.aggregated == RoleSpec(replicas=3, kv_blocks=64)
    assert (graph.frontend.host, graph.frontend.port, graph.frontend.processes) == ("0.0.0.0", 0, 2)
    assert graph.router.policy == "least-loaded"


def test_flags_override_a_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("model: a\nblock_size: 8\nfrontend: {port: 1234}\n")
    graph = graph_of("--graph", str(path), "--workers", "2")
    assert (graph.model, graph.block_size, graph.frontend.port) == ("a", 8, 1234)
    assert graph.roles.aggregated == RoleSpec(replicas=2)
    assert graph_of("b", "--graph", str(path)).model == "b"


def test_urls_are_workers_of_engine_openai() -> None:
    one, two = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
    role = graph_of("m", "--url", one, "--url", two, "--kv-events", "tcp://a:1", "--kv-events", "tcp://b:1")
    assert role.roles.aggregated == RoleSpec(
        replicas=2, engine="openai", engine_args={"url": [one, two], "kv_events": ["tcp://a:1", "tcp://b:1"]}
    )
    pair = graph_of("m", "--prefill-url", one, "--decode-url", two, "--engine-arg", "model=x").roles
    assert pair == Roles(
        prefill=RoleSpec(engine="openai", engine_args={"url": [one], "model": "x"}),
        decode=RoleSpec(engine="openai", engine_args={"url": [two], "model": "x"}),
    )
    mixed = graph_of("--demo", "--url", one, "--engine", "openai", "--engine-arg", "api=sglang").roles
    assert mixed.aggregated == RoleSpec(engine="openai", engine_args={"url": [one], "api": "sglang"})


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("serve --wrokers 2", "penstock serve: unknown flag --wrokers; did you mean '--workers'?"),
        ("serve --port=1 --hots=1", "--hots; did you mean '--host'?"),
        ("serve --bogus", "penstock serve: unknown flag --bogus; see penstock serve --help"),
        ("serve a b", "unexpected argument 'b'; see penstock serve --help"),
        ("srve", "invalid choice: 'srve' (choose from 'serve'"),
        ("serve --workers", "expected one argument"),
        ("serve", "serve what? Give a model directory or hub name, --demo"),
        ("serve --demo x", "--demo and x: serve one of them"),
        ("serve --demo --workers two", "--workers: roles.aggregated.replicas: must be a valid integer, got 'two'"),
        ("serve --set frontend.port=abc --port 8211 --demo", "--port and --set frontend.port set the same field; give one of them"),
        ("serve a --set model=b", "MODEL and --set model set the same field; give one of them"),
        ("serve --engine mock --engine foo", f"--engine: there is no engine 'foo'; known: {', '.join(sorted(engine_names()))}"),
        ("serve --demo --mock-speedup inf", "--mock-speedup: roles.aggregated.mock.speedup: must be a finite number, got 'inf'"),
        ("serve --demo --mock-speedup 3", "--mock-speedup 3: only with --engine mock, but the engine is paged"),
        ("serve --demo --prefill 1", "--prefill: no decode worker would take its KV; add --decode D"),
        ("serve --demo --workers 1 --decode 1", "--decode: no prefill worker would compute its prompts; add --prefill P"),
        ("serve --demo --set a.b=1", "--set a.b: a: unknown key; known: "),
        ("serve --demo --set frontend.port=[1", "--set frontend.port: did not find expected ',' or ']'"),
        ("serve --demo --policy least_loaded", "--policy: router.policy: 'least_loaded' is unknown; did you mean 'least-loaded'?"),
        ("serve --demo --set roles.aggregated.weight_dtype=fp8", "'bfloat16' or 'float16' with engine 'paged', got 'fp8'; engine 'mock' takes any"),
        ("serve --demo --workers -1", "--workers: must be >= 1 to serve anything, got -1"),
        ("serve --demo --set roles.aggregated.data_parallel=4", "data_parallel: must be 1 in this version, got 4"),
        ("serve --demo --prefill 1 --decode 0 --port 0", "roles.decode.replicas: must be >= 1 to serve anything, got 0"),
        (f"serve {__file__} --port 0", f"model: {__file__} is not a directory; expected a checkpoint's directory"),
        ("serve ./absent --port 0", "model: no such directory: ./absent"),
        ("serve --demo --host 192.0.2.7 --port 0", "192.0.2.7 is not an address of this machine"),
        ("serve m --url http://a:1 --workers 3", "one worker for each url, 1, got 3; leave replicas out"),
        ("serve m --prefill-url http://a:1", "--prefill-url: no decode server would take its KV; add --decode-url"),
        ("serve m --decode-url http://a:1", "--decode-url: no prefill server would compute its prompts; add --prefill-url"),
        ("serve m --url http://a:1 --engine vllm", "--url: running servers are workers of engine openai, got --engine vllm"),
        ("serve m --kv-events tcp://a:1", "--kv-events: no running server publishes there; add --url"),
        ("role w decoder", "ROLE: unknown 'decoder'; did you mean 'decode'?"),
        ("role w foo", "ROLE: unknown 'foo'; known: aggregated, decode, prefill"),
        ("role w decode --url localhost:1", "--url: 'localhost:1': expected a URL such as http://127.0.0.1:8000"),
        ("scale decoded 4", "unknown 'decoded'"),
        ("scale eu/decode 4", "run penstock scale decode 4 on one of its hosts"),
        ("scale link-eu", "run penstock scale ROLE N on one of its hosts"),
        ("scale link-eu/prefill 2", "run penstock scale prefill 2 on one of its hosts"),
        ("scale eu/nonsense 2", "run penstock scale ROLE 2 on one of its hosts"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_what_was_meant(
    capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    assert said in complaint(capsys, *command.split())


def test_what_cannot_be_asked_or_logged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["role", "w", "decode", "--url", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1: nobody answers" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "xml")
    assert complaint(capsys, "serve", "--demo") == "PENSTOCK_LOG_FORMAT: must be json or text, got 'xml'"


@pytest.mark.parametrize(
    ("graph", "code", "said"),
    [
        (
            "model: demo\nroles: {prefill: {replicas: 2}, decode: {}}",
            0,
            ["demo, 2 prefill (paged), 1 decode (paged), frontend on port 8000", "penstock serve takes it", "penstock simulate takes it"],
        ),
        (
            "model: demo\nroles: {aggregated: {engine: mock}}\nplanner: {max_workers: 3}",
            0,
            ["a planner scales 1 to 3 aggregated", "penstock serve takes it", "penstock simulate takes it"],
        ),
        (
            "model: llama-3.1-8b\nroles: {aggregated: {hardware: h100, kv: {host: 2x, object: 's3://bucket/kv:9x'}}}",
            0,
            ["kv.host: loading pays above ", "at 40 GB/s", "kv.object: loading pays above ", "simulated at 1 GB/s, so it helps only"],
        ),
        ("model: llama-3.1-8b\nroles: {aggregated: {hardware: h100, kv: {object: 's3://bucket/kv'}}}", 2, ["s3://bucket/kv has no size, which a simulation needs"]),
        (
            "model: llama-3.1-8b\nroles: {aggregated: {hardware: h100}}",
            0,
            ["penstock serve refuses it: model: 'llama-3.1-8b' is a shape for penstock simulate and penstock plan, without weights", "simulate takes it"],
        ),
        ("model: llama-3.1-8b\nroles: {aggregated: {}}", 2, ["raise tensor_parallel or pipeline_parallel; hardware was left out, which means cpu"]),
        ("model: ./absent\nroles: {aggregated: {}}", 2, ["serve refuses it: model: no such directory: ./absent", "simulate refuses it: model ./absent: its shape is not known"]),
        ("model: demo\nroles: {aggregated: {tensor_parallel: 3, engine: mock}}", 0, ["serve takes it", "take a tensor_parallel that divides 2, or a multiple of it"]),
        ("model: Qwen/Qwen3-0.6B\nroles: {aggregated: {}}", 0, ["serve takes it", "simulate refuses it: model Qwen/Qwen3-0.6B: its shape is not known"]),
        ("model: demo\nfrontend: {api_key_file: /none/keys}\nroles: {aggregated: {}}", 0, ["serve refuses it: api_key_file: /none/keys: No such file", "simulate takes it"]),
        (
            "model: demo\nfrontend: {tls: {certificate: /none/c.pem, key: /none/k.pem}}\nroles: {aggregated: {}}",
            0,
            ["refuses it: frontend.tls: certificate /none/c.pem, key /none/k.pem: No such file"],
        ),
        (
            "model: demo\nroles: {aggregated: {engine: paged, engine_args: {foo: 1}}}",
            0,
            ["refuses it: roles.aggregated: engine_args: engine 'paged' takes none, got foo; leave them out"],
        ),
        ("model: demo\nroles: {aggregated: {replicas: 100000000}}", 2, ["penstock serve refuses it: roles.aggregated.replicas: 100,000,000 workers", "penstock simulate refuses it"]),
        ("model: demo\ncontext_length: 1000000\nroles: {aggregated: {}}", 2, ["penstock serve refuses it: context_length: "]),
        ("model: demo\nblock_size: 16\nroles: {aggregated: {kv_blocks: 5}}", 0, ["kv_blocks is 5: a worker's KV holds 80 tokens", "need 512 and more, so raise it to 32 at least"]),
        ("model: demo\nroles: {prefill: {replicas: 0}, decode: {}}", 0, ["roles.prefill.replicas is 0: prompts are computed where they are answered"]),
        ("model: demo\nroles: {prefill: {}, decode: {replicas: 0}, aggregated: {}}", 0, ["roles.decode.replicas is 0: only aggregated workers decode remote prefills"]),
        ("model: demo\nroles: {prefill: {}, decode: {replicas: 0}}", 2, ["simulate refuses it: roles.decode.replicas: must be >= 1 to serve anything, got 0"]),
    ],
)  # fmt: skip
def test_graph_check_says_which_commands_take_it_and_what_it_means(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, graph: str, code: int, said: list[str]
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(f"{graph}\n")
    assert cli.main(["graph", "check", str(path)]) == code
    out = capsys.readouterr().out
    assert all(line.startswith(f"{path}: ") for line in out.splitlines())
    assert [text for text in said if text not in out] == [], out
    for hint in ("hardware was left out", "kv_blocks is "):
        assert (hint in out) is any(hint in text for text in said), "only where it matters"


def test_graph_check_opens_a_checkpoint_that_is_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    path = tmp_path / "graph.yaml"
    path.write_text(f"model: {tmp_path / 'empty'}\nroles: {{aggregated: {{}}}}\n")
    assert cli.main(["graph", "check", str(path)]) == 2
    said = capsys.readouterr().out
    assert re.search(rf"penstock serve refuses it: {tmp_path / 'empty'}.*config\.json", said), said
    model = tmp_path / "model"
    shutil.copytree(MODEL_DIR, model)
    config = json.loads((model / "config.json").read_text())
    del config["intermediate_size"]
    (model / "config.json").write_text(json.dumps(config))
    path.write_text(f"model: {model}\nroles: {{aggregated: {{engine: vllm}}}}\nplanner: {{max_workers: 3}}\n")
    cli.main(["graph", "check", str(path)])
    said = capsys.readouterr().out
    assert "penstock serve refuses it: planner: roles.aggregated: step times cannot be predicted" in said


def test_a_graph_with_a_planner_is_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, workload = tmp_path / "graph.yaml", tmp_path / "workload.yaml"
    path.write_text("model: demo\nroles: {aggregated: {engine: mock}}\nplanner: {max_workers: 3}\n")
    workload.write_text("requests: 3\nrate_per_s: 1\ninput_tokens: 20\noutput_tokens: 3\n")
    assert cli.main(["simulate", str(workload), "--graph", str(path)]) == 0
    assert "workers added" in capsys.readouterr().out


def test_an_interrupted_plan_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "Question", interrupt)
    arguments = "llama-3.1-8b --hardware h100 --gpus 1 --isl 100 --osl 10 --slo-ttft 1 --slo-itl 1"
    assert cli.main(["plan", *arguments.split()]) == 130
    assert capsys.readouterr().err == "penstock plan: interrupted; nothing was written\n"


def test_processes_of_a_plan_ignore_interrupts_and_sigterm_ends_it_in_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Processes(2) as processes:
        assert len(multiprocessing.active_children()) == 2, "started while interrupts are ignored"
        assert processes.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN
    with pytest.raises(SystemExit) as ended, Processes(1):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_output_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader who leaves is no error, nor is a closed stdout; a full disk is one line."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as left:
        monkeypatch.setattr(sys, "stdout", left)
        assert cli.main(["key"]) == 1
    assert capsys.readouterr().err == ""
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123 - a device
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["key"]) == 1
    assert capsys.readouterr().err == (
        "penstock: the output cannot be written: no space left on device; free space there\n"
    )
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["key"]) == 0
    assert cli.main(["key", "--none"]) == 2
    sys.stdout.close()
