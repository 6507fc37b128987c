"""`python -m benchmarks policies` in real processes: interrupted, it leaves nobody behind, and goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.command import main

ROOT = Path(__file__).parents[3]
ARGUMENTS = ("--policies", "kv,round-robin,product", "--cells", "S/8b-bf16/60", "--quick", "--jobs", "2")


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "policies", *ARGUMENTS, *map(str, arguments)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize(
    "everybody",
    [
        pytest.param(False, id="the command alone", marks=pytest.mark.nightly),
        pytest.param(True, id="all of a terminal"),
    ],
)
def test_an_interrupted_bench_leaves_nobody_and_goes_on(tmp_path, everybody):
    state, out, plot = tmp_path / "state.jsonl", tmp_path / "out.json", tmp_path / "plot.svg"
    process = start("--state", state)
    until = time.monotonic() + 60
    while len(lines(state)) < 2:  # the workload, and one run
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "no result in a minute"
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    (os.killpg if everybody else os.kill)(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not psutil.wait_procs(children, timeout=60)[1]
    before = lines(state)
    again = start("--state", state, "--json", out, "--plot", plot)
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert lines(state)[: len(before)] == before
    assert len(lines(state)) == 1 + 3
    report = json.loads(out.read_text())
    assert report["config"]["cells"] == ["S/8b-bf16/60"]
    assert set(report["samples"]) >= {"S/8b-bf16/60 kv ttft_mean_s", "S/8b-bf16/60 product e2e_p99_s"}
    assert report["figures"]["failed_requests"] == 0
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--jobs", "0"), "--jobs: must be >= 1, got 0"),
        (("--policies", "kv,prodcut"), "policy 'prodcut' is unknown"),
        (("--examples", "/nowhere"), "cannot be read: No such file"),
        (("--cells", "X/*"), "'X/*' matches none of"),
        (("--trace", "nothing.jsonl"), "nothing.jsonl: cannot be read"),
    ],
)
def test_a_wrong_option_is_refused(arguments, message, capsys):
    assert main(["policies", *ARGUMENTS, *arguments]) == 2
    assert message in capsys.readouterr().err
