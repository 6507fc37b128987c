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

from penstock import __version__, cli
from penstock.demo import MODEL_DIR
from penstock.engine.registry import engine_names
from penstock.frontend.config import PageConfig
from penstock.graph import Graph, Roles, RoleSpec, Supervision
from penstock.graph.frontend import FrontendSpec
from penstock.plan import command as plan_command
from penstock.plan.processes import Processes


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail with exit code 2 and one line."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" or captured.out.startswith("penstock    starting  model ")
    assert captured.err.startswith("penstock: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("penstock: ").strip()


def graph_of(*arguments: str) -> Graph:
    return cli.serve.graph_of(cli.make_parser().parse_args(["serve", *arguments]))


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"penstock {__version__}\n"


def test_unknown_flags_and_arguments_name_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "serve", "--wrokers", "2") == (
        "penstock serve: unknown flag --wrokers; did you mean '--workers'?"
    )
    assert complaint(capsys, "serve", "--port=1", "--hots=1").endswith("--hots; did you mean '--host'?")
    assert (
        complaint(capsys, "serve", "--bogus")
        == "penstock serve: unknown flag --bogus; see penstock serve --help"
    )
    assert complaint(capsys, "serve", "a", "b") == "unexpected argument 'b'; see penstock serve --help"
    assert "invalid choice: 'srve' (choose from 'serve'" in complaint(capsys, "srve")
    assert "expected one argument" in complaint(capsys, "serve", "--workers")


def test_it_must_be_said_once_what_to_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "serve").startswith("serve what? Give a model directory or hub name, --demo")
    assert complaint(capsys, "serve", "--demo", "x") == "--demo and x: serve one of them"


def test_flags_become_a_graph() -> None:
    assert graph_of("m") == Graph(model="m")
    assert graph_of("--engine", "mock") == Graph(
        model="demo", roles=Roles(aggregated=RoleSpec(engine="mock"))
    )
    graph = graph_of(
        "m", "--workers", "3", "--host", "0.0.0.0", "--port", "0", "--frontend-processes", "2", "--policy",
        "least-loaded", "--set", "block_size=32", "--set", "roles.aggregated.kv_blocks=64",
    )  # fmt: skip
    assert (graph.model, graph.block_size) == ("m", 32)
    assert graph.roles.aggregated == RoleSpec(replicas=3, kv_blocks=64)
    assert (graph.frontend.host, graph.frontend.port, graph.frontend.processes) == ("0.0.0.0", 0, 2)
    assert graph.router.policy == "least-loaded"


def test_the_demo_takes_little_memory_and_lets_the_page_kill_workers() -> None:
    small = RoleSpec(kv_blocks=1024)
    supervision = Supervision(spare_processes=0)
    assert graph_of("--demo") == Graph(
        model="demo",
        frontend=FrontendSpec(page=PageConfig(kills_workers=True)),
        roles=Roles(aggregated=RoleSpec(replicas=2, kv_blocks=1024)),
        supervision=supervision,
    )
    assert graph_of("--demo", "--workers", "1").roles == Roles(aggregated=small)
    spare = graph_of("--demo", "--set", "supervision.spare_processes=1").supervision
    assert spare == Supervision(spare_processes=1)
    assert graph_of("--demo", "--prefill", "1", "--decode", "1").roles == Roles(prefill=small, decode=small)
    assert graph_of("--demo", "--engine", "mock").roles.aggregated == RoleSpec(replicas=2, engine="mock")
    more = graph_of("--demo", "--set", "roles.aggregated.kv_blocks=9000").roles.aggregated
    assert more == RoleSpec(replicas=2, kv_blocks=9000)


def test_flags_override_a_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("model: a\nblock_size: 8\nfrontend: {port: 1234}\n")
    graph = graph_of("--graph", str(path), "--workers", "2")
    assert (graph.model, graph.block_size, graph.frontend.port) == ("a", 8, 1234)
    assert graph.roles.aggregated == RoleSpec(replicas=2)
    assert graph_of("b", "--graph", str(path)).model == "b"
    assert graph_of("--demo", "--graph", str(path)).model == "demo"


def test_mistakes_in_flags_name_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "serve", "--demo", "--workers", "two") == (
        "--workers: roles.aggregated.replicas: must be a valid integer, got 'two'"
    )
    assert complaint(capsys, "serve", "--set", "frontend.port=abc", "--port", "8211", "--demo") == (
        "--port and --set frontend.port set the same field; give one of them"
    )
    assert complaint(capsys, "serve", "a", "--set", "model=b") == (
        "MODEL and --set model set the same field; give one of them"
    )
    assert complaint(capsys, "serve", "--engine", "mock", "--engine", "foo") == (
        f"--engine: there is no engine 'foo'; known: {', '.join(sorted(engine_names()))}"
    )
    assert complaint(capsys, "serve", "--demo", "--mock-speedup", "inf") == (
        "--mock-speedup: roles.aggregated.mock.speedup: must be a finite number, got 'inf'"
    )
    assert complaint(capsys, "serve", "--demo", "--mock-speedup", "3") == (
        "--mock-speedup 3: only with --engine mock, but the engine is paged"
    )
    assert complaint(capsys, "serve", "--demo", "--prefill", "1") == (
        "--prefill: no decode worker would take its KV; add --decode D"
    )
    assert complaint(capsys, "serve", "--demo", "--workers", "1", "--decode", "1") == (
        "--decode: no prefill worker would compute its prompts; add --prefill P"
    )
    assert complaint(capsys, "serve", "--demo", "--set", "a.b=1").startswith(
        "--set a.b: a: unknown key; known: "
    )
    assert complaint(capsys, "serve", "--demo", "--set", "frontend.port=[1") == (
        "--set frontend.port: did not find expected ',' or ']'"
    )
    assert complaint(capsys, "serve", "--demo", "--policy", "least_loaded") == (
        "--policy: router.policy: 'least_loaded' is unknown; did you mean 'least-loaded'?"
    )
    assert complaint(capsys, "serve", "--demo", "--set", "roles.aggregated.weight_dtype=fp8") == (
        "--set: roles.aggregated.weight_dtype: must be one of 'auto', 'float32', 'bfloat16' or 'float16' with engine 'paged',"
        " got 'fp8'; engine 'mock' takes any, to be simulated"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--demo", "--workers", "0"), "--workers: must be >= 1 to serve anything, got 0"),
        (("--demo", "--workers", "-1"), "--workers: must be >= 1 to serve anything, got -1"),
        (("--demo", "--set", "roles.aggregated.tensor_parallel=2"), "tensor_parallel: must be 1 in this version, got 2"),
        (("--demo", "--set", "roles.aggregated.data_parallel=4"), "data_parallel: must be 1 in this version, got 4"),
        (("--demo", "--prefill", "1", "--decode", "0"), "roles.decode.replicas: must be >= 1 to serve anything, got 0"),
        (("--demo", "--prefill", "1"), "add --decode D"),
        ((__file__,), f"model: {__file__} is not a directory; expected a checkpoint's directory"),
        (("./absent",), "model: no such directory: ./absent"),
        (("--demo", "--host", "192.0.2.7", "--port", "0"), "192.0.2.7 is not an address of this machine"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    port = () if "--port" in arguments else ("--port", "0")
    assert text in complaint(capsys, "serve", *arguments, *port)


def test_an_unknown_log_format_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "xml")
    assert complaint(capsys, "serve", "--demo") == "PENSTOCK_LOG_FORMAT: must be json or text, got 'xml'"


def test_a_reader_of_the_output_may_leave(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("model: demo\nroles: {aggregated: {}}\n")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["graph", "check", str(path)]) == 1
    assert capsys.readouterr().err == ""


def test_an_interrupted_plan_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "Question", interrupt)
    arguments = "llama-3.1-8b --hardware h100 --gpus 1 --isl 100 --osl 10 --slo-ttft 1 --slo-itl 1"
    assert cli.main(["plan", *arguments.split()]) == 130
    assert capsys.readouterr().err == "penstock plan: interrupted; nothing was written\n"


def test_all_processes_of_a_plan_ignore_interrupts() -> None:
    with Processes(2) as processes:
        assert len(multiprocessing.active_children()) == 2, "started while interrupts are ignored"
        assert processes.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN


def test_sigterm_ends_a_plan_in_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, Processes(1):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_graphs_with_a_planner(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("model: demo\nroles: {aggregated: {engine: mock}}\nplanner: {max_workers: 3}\n")
    assert cli.main(["graph", "check", str(path)]) == 0
    assert capsys.readouterr().out == (
        f"{path}: demo, 1 aggregated (mock), frontend on port 8000\n"
        f"{path}: a planner scales 1 to 3 aggregated\n"
        f"{path}: penstock serve takes it\n"
        f"{path}: penstock simulate takes it\n"
    )
    workload = tmp_path / "workload.yaml"
    workload.write_text("requests: 3\nrate_per_s: 1\ninput_tokens: 20\noutput_tokens: 3\n")
    assert cli.main(["simulate", str(workload), "--graph", str(path)]) == 0
    assert "workers added" in capsys.readouterr().out
    model = tmp_path / "model"
    shutil.copytree(MODEL_DIR, model)
    config = json.loads((model / "config.json").read_text())
    del config["intermediate_size"]
    (model / "config.json").write_text(json.dumps(config))
    path.write_text(f"model: {model}\nroles: {{aggregated: {{engine: vllm}}}}\nplanner: {{max_workers: 3}}\n")
    cli.main(["graph", "check", str(path)])
    assert (
        "penstock serve refuses it: planner: roles.aggregated: step times cannot be predicted"
        in capsys.readouterr().out
    )


def test_graph_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("model: demo\nroles: {prefill: {replicas: 2}, decode: {}}\n")
    assert cli.main(["graph", "check", str(path)]) == 0
    assert capsys.readouterr().out == (
        f"{path}: demo, 2 prefill (paged), 1 decode (paged), frontend on port 8000\n"
        f"{path}: penstock serve takes it\n"
        f"{path}: penstock simulate takes it\n"
    )
    assert complaint(capsys, "graph", "check", str(path), "--set", "roles.decode.replicas=-1") == (
        "--set: roles.decode.replicas: must be >= 0, got -1"
    )


def test_graph_check_says_what_bandwidth_a_tier_needs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(
        "model: llama-3.1-8b\nroles: {aggregated: {hardware: h100, kv: {host: 2x, object: 's3://bucket/kv:9x'}}}\n"
    )
    assert cli.main(["graph", "check", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"kv\.host: loading pays above \d\.?\d* GB/s \(131 kB of KV a token x .*at 40 GB/s\n", out
    )
    assert re.search(r"kv\.object: loading pays above .* simulated at 1 GB/s, so it helps only", out)
    path.write_text(path.read_text().replace(":9x", ""))
    assert cli.main(["graph", "check", str(path)]) == 2
    assert "s3://bucket/kv has no size, which a simulation needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("graph", "serve", "simulate", "code"),
    [
        (
            "model: llama-3.1-8b\nroles: {aggregated: {hardware: h100}}\n",
            "refuses it: model: 'llama-3.1-8b' is a shape for penstock simulate and penstock plan, without weights",
            "takes it",
            0,
        ),
        (
            "model: llama-3.1-8b\nroles: {aggregated: {}}\n",
            "refuses it: model: 'llama-3.1-8b' is a shape",
            "raise tensor_parallel or pipeline_parallel; hardware was left out, which means cpu",
            2,
        ),
        (
            "model: ./absent\nroles: {aggregated: {}}\n",
            "refuses it: model: no such directory: ./absent",
            "refuses it: model ./absent: its shape is not known",
            2,
        ),
        (
            "model: demo\nroles: {aggregated: {tensor_parallel: 3, engine: mock}}\n",
            "takes it",
            "take a tensor_parallel that divides 2, or a multiple of it",
            0,
        ),
        (
            "model: Qwen/Qwen3-0.6B\nroles: {aggregated: {}}\n",
            "takes it",
            "refuses it: model Qwen/Qwen3-0.6B: its shape is not known",
            0,
        ),
        (
            "model: demo\nfrontend: {api_key_file: /none/keys}\nroles: {aggregated: {}}\n",
            "refuses it: api_key_file: /none/keys: No such file",
            "takes it",
            0,
        ),
        (
            "model: demo\nfrontend: {tls: {certificate: /none/c.pem, key: /none/k.pem}}\nroles: {aggregated: {}}\n",
            "refuses it: frontend.tls: certificate /none/c.pem, key /none/k.pem: No such file",
            "takes it",
            0,
        ),
        (
            "model: demo\nroles: {aggregated: {engine: paged, engine_args: {foo: 1}}}\n",
            "refuses it: roles.aggregated: engine_args: engine 'paged' takes none, got foo; leave them out",
            "takes it",
            0,
        ),
        (
            "model: org/not-here\nroles: {aggregated: {engine: mock, hardware: h100}}\n",
            "takes it",
            "refuses it: model org/not-here: its shape is not known",
            0,
        ),
        (
            "model: demo\nroles: {aggregated: {replicas: 100000000}}\n",
            "refuses it: roles.aggregated.replicas: 100,000,000 workers",
            "refuses it: roles.aggregated.replicas: 100,000,000 workers",
            2,
        ),
    ],
)
def test_graph_check_says_which_commands_take_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, graph: str, serve: str, simulate: str, code: int
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(graph)
    assert cli.main(["graph", "check", str(path)]) == code
    _, of_serve, of_simulate = capsys.readouterr().out.splitlines()
    assert of_serve.startswith(f"{path}: penstock serve ")
    assert serve in of_serve
    assert of_simulate.startswith(f"{path}: penstock simulate ")
    assert simulate in of_simulate
    assert ("hardware was left out" in of_simulate) == ("hardware was left out" in simulate)


def test_graph_check_opens_a_checkpoint_that_is_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    path = tmp_path / "graph.yaml"
    path.write_text(f"model: {tmp_path / 'empty'}\nroles: {{aggregated: {{}}}}\n")
    assert cli.main(["graph", "check", str(path)]) == 2
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "penstock serve" in line)
    assert f"refuses it: {tmp_path / 'empty'}" in said
    assert "config.json" in said
    path.write_text("model: demo\ncontext_length: 1000000\nroles: {aggregated: {}}\n")
    assert cli.main(["graph", "check", str(path)]) == 2
    assert "penstock serve refuses it: context_length: " in capsys.readouterr().out


def test_graph_check_says_that_kv_holds_no_ordinary_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("model: demo\nblock_size: 16\nroles: {aggregated: {kv_blocks: 5}}\n")
    assert cli.main(["graph", "check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        f"{path}: roles.aggregated.kv_blocks is 5: a worker's KV holds 80 tokens, and prompt and answer of a request must"
        " fit into it; ordinary requests need 512 and more, so raise it to 32 at least"
    )
    path.write_text("model: demo\nblock_size: 16\nroles: {aggregated: {kv_blocks: 32}}\n")
    assert cli.main(["graph", "check", str(path)]) == 0
    assert "kv_blocks" not in capsys.readouterr().out


def test_graph_check_says_what_a_role_without_workers_means(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("model: demo\nroles: {prefill: {replicas: 0}, decode: {}}\n")
    assert cli.main(["graph", "check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        f"{path}: roles.prefill.replicas is 0: prompts are computed where they are answered, until a prefill worker"
        " comes (penstock role WORKER prefill)"
    )
    path.write_text("model: demo\nroles: {prefill: {}, decode: {replicas: 0}, aggregated: {}}\n")
    assert cli.main(["graph", "check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        f"{path}: roles.decode.replicas is 0: only aggregated workers decode remote prefills, until a decode worker comes"
        " (penstock role WORKER decode)"
    )
    path.write_text("model: demo\nroles: {prefill: {}, decode: {replicas: 0}}\n")
    assert cli.main(["graph", "check", str(path)]) == 2
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{path}: penstock {command} refuses it: roles.decode.replicas: must be >= 1 to serve anything, got 0"
        for command in ("serve", "simulate")
    ]


def test_a_role_that_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "role", "w", "decoder") == ("ROLE: unknown 'decoder'; did you mean 'decode'?")
    assert complaint(capsys, "role", "w", "foo") == (
        "ROLE: unknown 'foo'; known: aggregated, decode, prefill"
    )
    assert complaint(capsys, "role", "w", "decode", "--url", "localhost:1") == (
        "--url: 'localhost:1': expected a URL such as http://127.0.0.1:8000"
    )
    assert cli.main(["role", "w", "decode", "--url", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1: nobody answers" in capsys.readouterr().err


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
    mixed = graph_of("m", "--url", one, "--engine", "openai", "--engine-arg", "api=sglang").roles.aggregated
    assert mixed == RoleSpec(engine="openai", engine_args={"url": [one], "api": "sglang"})


def test_urls_and_other_workers_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "serve", "m", "--url", "http://a:1", "--workers", "3")
    assert "one worker for each url, 1, got 3; leave replicas out" in said
    said = complaint(capsys, "serve", "m", "--prefill-url", "http://a:1")
    assert "--prefill-url: no decode server would take its KV; add --decode-url" in said
    said = complaint(capsys, "serve", "m", "--decode-url", "http://a:1")
    assert "--decode-url: no prefill server would compute its prompts; add --prefill-url" in said
    said = complaint(capsys, "serve", "m", "--url", "http://a:1", "--engine", "vllm")
    assert "--url: running servers are workers of engine openai, got --engine vllm" in said
    said = complaint(capsys, "serve", "m", "--kv-events", "tcp://a:1")
    assert "--kv-events: no running server publishes there; add --url" in said


def test_the_demo_model_may_be_that_of_running_servers() -> None:
    role = graph_of("--demo", "--url", "http://a:1").roles.aggregated
    assert role == RoleSpec(engine="openai", engine_args={"url": ["http://a:1"]})


def test_a_closed_stdout_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert cli.main(["key"]) == 0
    assert cli.main(["key", "--none"]) == 2
    sys.stdout.close()


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123 - a device
        monkeypatch.setattr("sys.stdout", full)
        assert cli.main(["key"]) == 1
    assert capsys.readouterr().err == (
        "penstock: the output cannot be written: no space left on device; free space there\n"
    )
