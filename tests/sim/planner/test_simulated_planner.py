"""The planner on simulated deployments: real routers and workers, which it starts, drains and flips."""

import json
import random
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.core.types.instances import Role
from penstock.graph import build
from penstock.sim.deployment import plan_deployment
from penstock.sim.report import make_report
from penstock.sim.simulate import simulate
from penstock.sim.workload import SimSession, WorkloadConfig, make_sessions

A = Role.AGGREGATED
WORKER = {"hardware": "h100", "tensor_parallel": 4}
GRAPH = {
    "model": "llama-3.1-70b",
    "block_size": 256,
    "roles": {"aggregated": WORKER},
    "slo": {"ttft_s": 4.0, "itl_s": 0.06},
    "planner": {"max_workers": 5, "cool_down_s": 120},
}


def later(seconds, sessions):
    return [SimSession(seconds + each.at_s, each.turns, each.prompt) for each in sessions]


def stepped(*steps, seed=1, output_tokens=64):
    """Requests of (seconds, requests a second, prompt tokens), one step after the other."""
    rng, sessions, begin_s = random.Random(seed), [], 0.0
    for seconds, rate_per_s, tokens in steps:
        config = WorkloadConfig(
            requests=round(seconds * rate_per_s),
            rate_per_s=rate_per_s,
            input_tokens=tokens,
            output_tokens=output_tokens,
        )
        sessions += later(begin_s, make_sessions(config, rng))
        begin_s += seconds
    return sorted(sessions, key=lambda session: session.at_s)


def simulated(graph, sessions, **options):
    deployment = plan_deployment(build(graph), beside=Path())
    deployment.check(sessions)
    recording = simulate(deployment, sessions, seed=1, **options)
    return make_report(recording, deployment, deployment.graph.slo, wall_s=1.0)


def ready(report, role):
    return [entry.get(role, {"ready": 0})["ready"] for entry in report["scaling"]["workers"]]


LONG = 16000


@pytest.mark.slow
def test_workers_follow_the_load_and_no_request_fails():
    load = stepped((240, 0.1, LONG), (500, 1.5, LONG), (600, 0.1, LONG))
    report = simulated(GRAPH, load, start_s=30.0)
    counts = ready(report, A)
    assert counts[0] == 1
    assert max(counts) >= 3, "as many as the load needs"
    assert counts[-1] == 1, "and back"
    assert report["failed"] == 0
    scaling = report["scaling"]
    assert scaling["turns"] <= 2
    assert scaling["changes"]["flip"] == 0
    assert scaling["changes"]["add"] == scaling["changes"]["retire"] >= 2
    assert scaling["roles"]["aggregated"]["ready_max"] == max(counts)
    assert len(scaling["decisions"]) >= 2
    hours = scaling["roles"]["aggregated"]["worker_hours"]
    assert report["gpu_hours"] == pytest.approx(4 * hours)
    duration_h = report["duration_s"] / 3600
    assert duration_h < hours < max(counts) * duration_h
    assert report["tokens_per_joule"] == pytest.approx(
        report["output_tokens_per_s"] * report["duration_s"] / (4 * hours * 3600 * 1275)
    )
    late = simulated(GRAPH | {"planner": None}, load)
    assert late["scaling"] is None
    assert late["slo_attainment"] < report["slo_attainment"] - 0.2, "one worker alone is too few"


def test_the_table_and_the_page_show_the_changes(tmp_path, capsys):
    graph, spec = tmp_path / "graph.yaml", tmp_path / "load.yaml"
    graph.write_text(json.dumps(GRAPH))
    spec.write_text("requests: 40\nrate_per_s: 2\ninput_tokens: 4000\noutput_tokens: 20\n")
    page = tmp_path / "page.html"
    assert main(["simulate", str(spec), "--graph", str(graph), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    for row in (
        "workers added",
        "turns of scaling",
        "aggregated: workers that serve, mean",
        "SLO attainment",
    ):
        assert row in out
    assert "with those that start or drain" in page.read_text()
    other = tmp_path / "fixed.yaml"
    other.write_text(json.dumps(GRAPH | {"planner": None}))
    assert main(["simulate", str(spec), "--compare", str(graph), str(other), "--html", str(page)]) == 0
    assert page.read_text().count("workers that hold devices") >= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--worker-start", "nan"], "--worker-start: must be 0.1 to 86,400 s, got nan"),
        (["--worker-start=9", "--set=planner=null"], "--worker-start: no worker starts without a planner"),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(tmp_path, capsys, flags, message):
    graph, spec = tmp_path / "graph.yaml", tmp_path / "load.yaml"
    graph.write_text(json.dumps(GRAPH))
    spec.write_text("requests: 4\nrate_per_s: 2\n")
    assert main(["simulate", str(spec), "--graph", str(graph), *flags]) == 2
    assert message in capsys.readouterr().err
