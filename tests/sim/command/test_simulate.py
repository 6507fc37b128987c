"""`penstock simulate`: what it reports, that it repeats, and what it refuses."""

import html
import json
import os
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock import __version__
from penstock.cli import main
from penstock.core.errors import ConfigError
from penstock.graph import Overrides, load
from penstock.perf.model_config import find_shape
from penstock.sim.deployment import plan_deployment
from penstock.sim.network import NetworkConfig
from penstock.sim.report import latencies_s
from penstock.sim.simulate import simulate
from penstock.sim.workload import WorkloadConfig, make_sessions

ROOT = Path(__file__).parents[3]
GRAPHS = ROOT / "examples" / "graphs"
DATA = ROOT / "tests" / "data"
SMALL = GRAPHS / "8b-h100-x8.yaml"
SHIPPED = sorted(GRAPHS.glob("*.yaml"))

SPEC = """
requests: 60
rate_per_s: 20
burstiness: 4
input_tokens: 700
output_tokens: 60
length_sigma: 0.7
turns: 3
think_s: 2
shared_prefix_tokens: 512
prefix_groups: 4
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "chat.yaml"
    path.write_text(SPEC)
    return path


def simulated(tmp_path, *arguments):
    out = tmp_path / "out.json"
    assert main(["simulate", *map(str, arguments), "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_the_report_has_the_documented_keys_and_adds_up(tmp_path, spec, capsys):
    report = simulated(tmp_path, spec, "--graph", SMALL, "--set", "roles.aggregated.replicas=2")
    assert list(report) == [
        "requests", "completed", "failed", "duration_s", "ttft_s", "itl_s", "e2e_s", "output_tokens_per_s",
        "goodput_rps", "slo_attainment", "kv_hit_ratio", "kv_hit_ratio_by_tier", "tenants", "roles", "kv_transfer", "scaling", "gpu_hours", "tokens_per_joule", "usd_per_million_tokens", "wall", "inputs",
    ]  # fmt: skip
    for name in ("ttft_s", "itl_s", "e2e_s"):
        assert list(report[name]) == ["mean", "p50", "p90", "p99"]
        assert 0 < report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"]
    assert list(report["wall"]) == ["seconds", "requests_per_s", "peak_rss_bytes"]
    assert report["requests"] == report["completed"] == 60
    assert report["failed"] == 0
    assert report["tenants"] == {}
    assert report["kv_transfer"] is None
    assert report["roles"]["aggregated"]["generated_tokens"] == round(
        report["output_tokens_per_s"] * report["duration_s"]
    )
    assert report["gpu_hours"] == pytest.approx(2 * report["duration_s"] / 3600)
    tokens = report["output_tokens_per_s"] * report["duration_s"]
    assert report["tokens_per_joule"] == pytest.approx(tokens / (2 * 1275 * report["duration_s"]))
    assert report["usd_per_million_tokens"] == pytest.approx(1e6 * 3.0 * report["gpu_hours"] / tokens)
    assert 0.3 < report["kv_hit_ratio"] < 0.9
    out = capsys.readouterr().out
    assert "USD/1M tokens" in out
    assert "roles.aggregated.replicas=2" in out
    assert "h100 at 3 USD an hour and 1,275 W a device" in out


def test_a_report_says_what_it_is_of(tmp_path, capsys):
    profile = ROOT / "examples" / "profiles" / "70b-h100-bf16-tp4.json"
    page = tmp_path / "page.html"
    flags = [
        "--engine-profile", profile, "--requests", "3", "--seed", "7", "--policy", "random", "--html", page,
    ]  # fmt: skip
    inputs = simulated(tmp_path, DATA / "azure_trace.csv", "--graph", SMALL, *flags)["inputs"]
    said = inputs.pop("engine_profile")
    assert inputs == {
        "version": __version__, "workload": "azure_trace.csv", "workload_flags": {"requests": 3}, "seed": 7, "exact": False,
        "graph": SMALL.name, "set": {"router.policy": "random"}, "policy": "random",
        "slo": {"ttft_s": 2.0, "itl_s": 0.05, "percentile": inputs["slo"]["percentile"]},
        "hardware": "h100", "devices": 8, "usd_per_hour": 3.0, "watts": 1275.0, "tokens_per_step": 1.0,
        "worker_start_s": None,
    }  # fmt: skip
    assert (said["file"], said["model"], said["tensor_parallel"]) == (profile.name, "llama-3.1-70b", 4)
    assert f"engines on the profile {profile.name}" in page.read_text()
    text = capsys.readouterr().err
    assert "is of another engine: model llama-3.1-70b for llama-3.1-8b, tensor_parallel 4 for 1" in text


def test_the_same_seed_gives_the_same_report_in_every_process(tmp_path, spec):
    reports = []
    for hash_seed in ("0", "1"):
        out = tmp_path / f"out-{hash_seed}.json"
        command = [sys.executable, "-m", "penstock", "simulate", spec, "--graph", SMALL, "--seed", "5"]
        subprocess.run(
            [*command, "--json", out],
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )
        report = json.loads(out.read_text())
        del report["wall"]
        reports.append(json.dumps(report))
    assert reports[0] == reports[1]


@pytest.mark.parametrize("number", range(len(SHIPPED)), ids=[path.stem for path in SHIPPED])
def test_shipped_graphs_play_a_trace(tmp_path, number):
    trace = ("azure_trace.csv", "mooncake_trace.jsonl")[number % 2]
    report = simulated(tmp_path, DATA / trace, "--graph", SHIPPED[number])
    assert report["completed"] == report["requests"] == 6


def test_routing_by_prefix_finds_more_of_it_than_taking_turns(tmp_path, spec):
    hits = {
        policy: simulated(tmp_path, spec, "--graph", SMALL, "--policy", policy)["kv_hit_ratio"]
        for policy in ("kv", "round-robin")
    }
    assert hits["kv"] > hits["round-robin"] + 0.1


def test_a_request_beyond_the_context_fails_alone(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 140000, "output_length": 5}\n'
        '{"timestamp": 0, "input_length": 1400, "output_length": 5}\n'
    )
    report = simulated(tmp_path, path, "--graph", SMALL)
    assert (report["completed"], report["failed"]) == (1, 1)
    assert "8b-h100-x8: 1 requests failed with invalid_request_error" in capsys.readouterr().err


def test_the_page_stands_alone_and_draws_its_charts(tmp_path, spec):
    page = tmp_path / "report.html"
    simulated(tmp_path, spec, "--graph", SMALL, "--html", page)
    text = page.read_text()
    assert not re.search(r"https?:|src=|href=|url\(|@import", text)
    titles = re.findall(r"<figcaption>([^<]*) <small>", text)
    assert titles == [
        "Queue", "Running", "KV in use", "Cache hits", "Time to first token", "Time between tokens", "End to end",
        "Time to first token over time", "Goodput", "Output",
    ]  # fmt: skip
    charts = [json.loads(html.unescape(text)) for text in re.findall(r'data-chart="([^"]*)"', text)]
    series = [each for chart in charts for each in chart["series"] if any(y is not None for y in each["ys"])]
    assert len(series) > 3 * 8 + 8  # a worker that had no prompt has no hit ratio
    for chart in charts:
        assert all(low <= high for low, high in pairwise(chart["xs"]))
        for each in chart["series"]:
            assert len(each["ys"]) == len(chart["xs"]) > 10
            assert all(0 <= y <= chart["y_max"] for y in each["ys"] if y is not None)


def test_requests_that_never_meet_take_what_the_latency_model_says(tmp_path):
    """A minute apart: the way there and back, the prompt, and then a step for each token."""
    path, lengths, way_s = tmp_path / "trace.jsonl", (100, 500, 1000, 2000), 2 * NetworkConfig().latency_s
    line = '{"timestamp": %d, "input_length": %d, "output_length": 400}\n'
    path.write_text("".join(line % (60_000 * number, tokens) for number, tokens in enumerate(lengths)))
    report = simulated(tmp_path, path, "--graph", SMALL)
    price = plan_deployment(load(SMALL), beside=GRAPHS).role_groups[0].latency
    ttft_s = np.array([way_s + price.prefill_s(tokens) for tokens in lengths])
    decode_s = np.array(
        [sum(price.decode_step_s(1, tokens + step) for step in range(1, 400)) for tokens in lengths]
    )
    for name, expected in (("ttft_s", ttft_s), ("itl_s", decode_s / 399), ("e2e_s", ttft_s + decode_s)):
        percentiles = dict(zip(("p50", "p90", "p99"), np.percentile(expected, (50, 90, 99)), strict=True))
        assert report[name] == pytest.approx({"mean": expected.mean(), **percentiles}, rel=1e-3), name


def test_dollars_and_watts_of_ones_own_are_reckoned_with_and_shown(tmp_path, spec, capsys):
    page = tmp_path / "report.html"
    flags = ("--set", "roles.aggregated.usd_per_hour=1.5", "--set", "roles.aggregated.watts=700")
    usual = simulated(tmp_path, spec, "--graph", SMALL)
    own = simulated(tmp_path, spec, "--graph", SMALL, *flags, "--html", page)
    assert own["usd_per_million_tokens"] == pytest.approx(usual["usd_per_million_tokens"] / 2)
    assert own["tokens_per_joule"] == pytest.approx(usual["tokens_per_joule"] * 1275 / 700)
    assert (own["inputs"]["usd_per_hour"], own["inputs"]["watts"]) == (1.5, 700.0)
    assert "h100 at 1.5 USD an hour and 700 W a device" in page.read_text()
    assert "h100 at 1.5 USD an hour and 700 W a device" in capsys.readouterr().out


def test_speculation_shortens_the_time_between_tokens_and_no_prompt(tmp_path):
    """One request alone: the weights' bytes bind, so a step costs what it reads: all weights, and a layer and the head a draft."""
    path, page = tmp_path / "trace.jsonl", tmp_path / "report.html"
    path.write_text('{"timestamp": 0, "input_length": 1000, "output_length": 400}\n')
    plain = simulated(tmp_path, path, "--graph", SMALL)
    flags = ("--set", "roles.aggregated.tokens_per_step=3", "--html", page)
    drafted = simulated(tmp_path, path, "--graph", SMALL, *flags)
    exact = simulated(tmp_path, path, "--graph", SMALL, *flags, "--exact")
    assert drafted["ttft_s"]["p50"] == pytest.approx(plain["ttft_s"]["p50"])
    shape = find_shape("llama-3.1-8b")
    layers = shape.dense_params()
    read = 1 + 2 * (layers / shape.layers + shape.head_params()) / (layers + shape.head_params())
    assert drafted["itl_s"]["p50"] == pytest.approx(read * plain["itl_s"]["p50"] / 3, rel=0.05)
    assert exact["e2e_s"]["p50"] == pytest.approx(drafted["e2e_s"]["p50"], rel=1e-3)
    assert drafted["inputs"]["tokens_per_step"] == 3
    assert (drafted["inputs"]["exact"], exact["inputs"]["exact"]) == (False, True)
    assert "3 tokens a decode step" in page.read_text()


def test_deployments_are_put_side_by_side(tmp_path, spec, capsys):
    big = GRAPHS / "70b-h100-tp4-x4.yaml"
    reports = simulated(tmp_path, spec, "--compare", SMALL, big)
    assert list(reports) == ["8b-h100-x8", "70b-h100-tp4-x4"]
    assert reports["70b-h100-tp4-x4"]["ttft_s"]["p50"] > reports["8b-h100-x8"]["ttft_s"]["p50"]
    alone = simulated(tmp_path, spec, "--graph", big)
    del alone["wall"], reports["70b-h100-tp4-x4"]["wall"]
    assert reports["70b-h100-tp4-x4"] == alone
    assert "70b-h100-tp4-x4" in capsys.readouterr().out


def _run(policy, *, exact, seed, kv_blocks=700, tiers=()):
    """Give each request's (time to the first token, to the last, cached tokens), and tokens by tier."""
    settings = [
        f"router.policy={policy}", "roles.aggregated.replicas=8", f"roles.aggregated.kv_blocks={kv_blocks}",
        "roles.aggregated.max_running_requests=64", "roles.aggregated.max_batch_tokens=2048", *tiers,
    ]  # fmt: skip
    workload = WorkloadConfig(
        requests=120, rate_per_s=12, input_tokens=900, output_tokens=100, length_sigma=0.6, turns=4, think_s=2,
        shared_prefix_tokens=1024, prefix_groups=6,
    )  # fmt: skip
    deployment = plan_deployment(load(SMALL, Overrides(settings)), beside=GRAPHS, exact=exact)
    recording = simulate(deployment, make_sessions(workload, random.Random(seed)), seed=seed)
    ttft_s, _, e2e_s = latencies_s(recording)
    order = np.argsort(recording.sent_s)
    cached = np.array(recording.cached_tokens)[order]
    return ttft_s[order], e2e_s[order], cached, recording.onboarded_tokens.tolist()


TIERS = {"kv_blocks": 160, "tiers": ["roles.aggregated.kv.host=1.5x", "roles.aggregated.kv.disk=4x"]}


@pytest.mark.parametrize(
    ("policy", "seed", "options"),
    [
        ("kv", 1, {}),
        pytest.param("kv", 5, {}, marks=pytest.mark.nightly),
        ("least-loaded", 3, {}),
        ("kv", 1, TIERS),
        pytest.param("least-loaded", 1, TIERS, marks=pytest.mark.nightly),
    ],
)
def test_a_whole_deployment_jumps_as_it_steps(policy, seed, options):
    """Whatever the policy looks at is told at the same moments: each request finds as much KV, and takes as long."""
    exact, jump = (_run(policy, exact=exact, seed=seed, **options) for exact in (True, False))
    assert len(exact[0]) == 120
    assert jump[0] == pytest.approx(exact[0], rel=1e-3)
    assert jump[1] == pytest.approx(exact[1], rel=1e-3)
    assert (jump[2] == exact[2]).all()
    assert jump[2].sum() > 90_000
    assert jump[3] == exact[3]
    assert not options or jump[3][0] > 10_000


def test_adapters_are_asked_for_where_they_are():
    settings = [
        "roles.aggregated.engine=mock", "roles.aggregated.replicas=4",
        "roles.aggregated.adapters=[a,b,c]", "roles.aggregated.adapters_per_worker=1",
    ]  # fmt: skip
    deployment = plan_deployment(load(SMALL, Overrides(settings)), beside=GRAPHS)
    usual = {"requests": 120, "rate_per_s": 20, "input_tokens": 300, "output_tokens": 20}

    def cached_tokens(**fields):
        workload = WorkloadConfig(shared_prefix_tokens=1024, **usual, **fields)
        recording = simulate(deployment, make_sessions(workload, random.Random(1)), seed=1)
        assert recording.failed == 0
        return sum(recording.cached_tokens)

    by_adapter = cached_tokens(adapters=3)
    prefixes = 120 - by_adapter / 1024
    assert 3 <= prefixes < 12, "each worker computes the prefix for its adapter, once or for a few at once"
    assert cached_tokens() > by_adapter
    with pytest.raises(
        ConfigError, match=r"roles.aggregated.adapters: the workload asks for 4 of them, and 3 are"
    ):
        deployment.check(
            make_sessions(WorkloadConfig(requests=4, rate_per_s=1, adapters=4), random.Random(1))
        )
