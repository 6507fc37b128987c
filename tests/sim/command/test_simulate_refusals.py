"""What `penstock simulate` refuses, and how it ends: in a line with the value and the fix, never in a traceback."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main

ROOT = Path(__file__).parents[3]
GRAPHS = ROOT / "examples" / "graphs"
DATA = ROOT / "tests" / "data"
SMALL = GRAPHS / "8b-h100-x8.yaml"


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "chat.yaml"
    path.write_text("rate_per_s: 5")
    return path


def refusal(capsys, *arguments):
    code = main(["simulate", *map(str, arguments)])
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("penstock: ")
    assert "Traceback" not in error
    return error


def test_a_bad_line_is_named_or_passed_over(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text((DATA / "mooncake_trace.jsonl").read_text() + '{"timestamp": "soon"}\n')
    assert f"{path}: line 7: " in refusal(capsys, path, "--graph", SMALL)
    out = tmp_path / "out.json"
    assert main(["simulate", str(path), "--graph", str(SMALL), "--skip-bad", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["requests"] == 6
    assert f"1 line was passed over (--skip-bad), the first: {path}: line 7: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=llama-3.1-70b"], "141.1 GB a device of bf16 weights|GB of bf16 weights a device do not fit"),
        (["context_length=1000"], "the longest request has 8,030 tokens, prompt and output, got 1,000; raise it"),
        (["--requests", "0"], "--requests: must be >= 1"),
        (["--slo-ttft", "-1"], "--slo-ttft: slo.ttft_s: must be > 0"),
        (["--policy", "best"], "--policy: router.policy: 'best' is unknown"),
        (["--speed", "2", "--rate", "3"], "give one of them"),
        (["--hit-ratio", "0.5"], "--hit-ratio: only with a trace without prefixes"),
        (["--seed", "-1"], "--seed: must be >= 0, got -1"),
        (["--json", "-"], "--json: -: expected a file; the table goes to stdout, as in --json FILE"),
        (["kv_blocks=20"], "KV: the longest request has 8,030 tokens, and a worker's KV holds 1,280"),
        (["kv_blocks=20000"], "20000 blocks of 64 tokens do not fit"),
        (["kv.host=0.0001x"], "kv.host: 0.0001x is less than one block of 8.39 MB (the device has 6,668)"),
        (["replicas=100000000"], "a router knows at most 1,024"),
        (["max_batch_tokens=10"], "must be >= max_running_requests, a token of each in every step, got 10 and 256"),
        (["tensor_parallel=3"], "32 attention heads on 3 devices are 10.67 each"),
        (["tokens_per_step=0.5"], "tokens_per_step: must be >= 1.0, got 0.5"),
        (["tokens_per_step=3", "max_batch_tokens=600"], "3 tokens to verify are 768 in a step, more than its"),
        (["tokens_per_step=2.5", "draft_tokens=1"], "draft_tokens: must be >= 2, as 1 drafted and one that is sure"),
        (["tokens_per_step=2", "engine=paged"], "must be 1 with engine 'paged', which does not speculate, got 2"),
        (["tokens_per_step=2", "profile=p.json"], "must be 1 with a profile, got 2: p.json says the time between"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(capsys, arguments, message):
    """What has a `=` is a setting, of the role unless it is the graph's."""
    if "=" in arguments[0]:
        graphs = ("model", "context_length")
        paths = [each if each.startswith(graphs) else f"roles.aggregated.{each}" for each in arguments]
        arguments = [f"--set={path}" for path in paths]
    error = refusal(capsys, DATA / "mooncake_trace.jsonl", "--graph", SMALL, *arguments)
    assert any(part in error for part in message.split("|")), error


def test_one_deployment_or_several_must_be_given(capsys, spec):
    assert "give one of them" in refusal(capsys, spec)
    assert "give one of them" in refusal(capsys, spec, "--graph", SMALL, "--compare", SMALL)
    assert "is given twice" in refusal(capsys, spec, "--compare", SMALL, SMALL)


@pytest.mark.parametrize("flag", ["--speed", "--rate", "--slo-ttft", "--slo-itl", "--hit-ratio"])
@pytest.mark.parametrize("value", ["nan", "=-inf", "fast"])
def test_no_number_is_too_absurd_to_be_refused(capsys, flag, value):
    arguments = [f"{flag}{value}"] if value.startswith("=") else [flag, value]
    assert flag in refusal(capsys, DATA / "azure_trace.csv", "--graph", SMALL, *arguments)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "is empty; must be a mapping"),
        ("rate_per_s: [", ":1:14: "),
        ("requests: 5", "rate_per_s: missing"),
        ("rate_per_s: .nan", "rate_per_s: must be a finite number, got nan"),
        ("rate_per_s: 1e-12", "raise rate_per_s"),
        ("rate_per_s: 5\nthink_s: 1e12", "think_s: must be <= 86400.0"),
        ("rate_per_s: 5\nspread: 0.5", "spread: unknown key; the spread of lengths is length_sigma"),
        ("rate_per_s: 5\nturns: 1000\ninput_tokens: 100000", "KV: the longest request has"),
    ],
)
def test_a_wrong_workload_names_file_and_field(tmp_path, capsys, spec, message):
    path = tmp_path / "chat.yaml"
    path.write_text(spec)
    assert message in refusal(capsys, path, "--graph", SMALL)


@pytest.mark.parametrize("flag", ["--speed=2", "--rate=2", "--requests=2", "--hit-ratio=0.5", "--skip-bad"])
def test_trace_flags_are_refused_with_a_synthetic_workload(tmp_path, capsys, flag):
    path = tmp_path / "chat.yaml"
    path.write_text("rate_per_s: 5")
    assert f"{flag.partition('=')[0]}: only with a trace; {path}" in refusal(
        capsys, path, "--graph", SMALL, flag
    )


def test_a_report_that_cannot_be_written_is_found_before_the_run(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text((DATA / "mooncake_trace.jsonl").read_text())
    for arguments, message in (
        (["--json", tmp_path], "expected a file in a directory that exists"),
        (["--json", tmp_path / "no" / "out.json"], "expected a file in a directory that exists"),
        (["--html", "/proc/out.html"], "--html: /proc/out.html: cannot be written"),
        (["--json", trace], "would be overwritten: it is read as"),
        (["--json", SMALL], "would be overwritten: it is read as"),
        (["--json", tmp_path / "a", "--html", tmp_path / "a"], "it is written by --json"),
    ):
        assert message in refusal(capsys, trace, "--graph", SMALL, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.jsonl"]


def test_a_full_disk_is_a_line_after_the_table(capsys):
    code = main(["simulate", str(DATA / "azure_trace.csv"), "--graph", str(SMALL), "--json", "/dev/full"])
    said = capsys.readouterr()
    assert code == 1
    assert "requests" in said.out
    assert said.err == "penstock: --json: /dev/full: cannot be written: No space left on device\n"


def test_a_run_that_completes_nothing_fails(tmp_path, capsys):
    path, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    path.write_text('{"timestamp": 0, "input_length": 140000, "output_length": 5}\n')
    assert main(["simulate", str(path), "--graph", str(SMALL), "--json", str(out)]) == 1
    assert "1 of 1 prompts do not fit the context of 131,072 tokens and will fail" in capsys.readouterr().err
    report = json.loads(out.read_text())
    assert (report["requests"], report["completed"], report["failed"]) == (1, 0, 1)
    assert report["ttft_s"]["mean"] is None


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("decode", {"batch": 0}, "batch: must be from 1 to 1,000,000,000, got 0"),
        ("decode", {"seconds": 1e300}, "seconds must be > 0 and <= 3600, got 1e+300"),
        ("prefill", {"new_tokens": 0}, "new_tokens: must be from 1 to"),
        ("prefill", {"foo": 1}, "unknown field `foo` - at `$.prefill[0]`"),
        (None, {"kv_capacity_tokens": -5}, "kv_capacity_tokens: must be from 0 to"),
    ],
)
def test_an_absurd_profile_names_file_and_field(tmp_path, capsys, part, change, message):
    profile = json.loads((ROOT / "examples" / "profiles" / "8b-h100-bf16-tp1.json").read_text())
    (profile if part is None else profile[part][0]).update(change)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    error = refusal(capsys, DATA / "azure_trace.csv", "--graph", SMALL, "--engine-profile", path)
    assert f"penstock: {path}: " in error
    assert message in error
    assert "Point(" not in error


@pytest.mark.slow
def test_ctrl_c_ends_a_run_at_once_and_without_a_traceback(tmp_path):
    """What is said of a prompt that does not fit shows that the run begins."""
    path = tmp_path / "long.jsonl"
    line = '{"timestamp": %d, "input_length": %d, "output_length": 50}\n'
    path.write_text(
        "".join(line % (20 * number, 200_000 if number == 0 else 500) for number in range(100_000))
    )
    command = [sys.executable, "-m", "penstock", "simulate", str(path), "--graph", str(SMALL)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "do not fit the context" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (
        130, "", "penstock simulate: interrupted; no report was written\n",
    )  # fmt: skip
