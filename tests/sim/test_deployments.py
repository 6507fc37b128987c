"""The compared deployments: the search for the largest goodput, engines that differ from their model, a quick run."""

import json
from pathlib import Path

import pytest

from penstock.bench.curves import WORKLOADS, curves
from penstock.bench.goodput import Search
from penstock.bench.slower import slower_profile
from penstock.bench.systems import CALCULATED, SIMULATED
from penstock.cli import main
from penstock.core.types import Role
from penstock.graph import Overrides, Slo, load
from penstock.perf.parallel import Parallel
from penstock.perf.placement import Demand, Placement, place_aggregated
from penstock.perf.profile import Profile, ProfiledModel
from penstock.sim.deployment import plan_deployment
from penstock.sim.workload import WorkloadConfig

ROOT = Path(__file__).parents[2]
GRAPHS, PROFILES = ROOT / "examples" / "graphs", ROOT / "examples" / "profiles"
BY_NAME = {system.name: system for system in SIMULATED}
HUNDRED = Placement(parallel=Parallel(), batch=100, requests_per_s=1.0, latency_s=0.05)
SLO = Slo(ttft_s=2.0, itl_s=0.05)


def short_answers(requests: int, rate_per_s: float) -> WorkloadConfig:
    return WorkloadConfig(requests=requests, rate_per_s=rate_per_s, input_tokens=2000, output_tokens=20)


@pytest.mark.parametrize("estimate", [5.0, 60.0])
def test_the_largest_goodput_is_found_from_any_estimate(estimate: float) -> None:
    system = BY_NAME["8b-h100"]
    graph = system.graph(HUNDRED, replicas=1, slo=SLO, step_tokens=8192)
    deployment = plan_deployment(graph, beside=GRAPHS)
    found = Search(precision=0.1, requests_min=300).largest(deployment, short_answers, SLO, estimate)
    prefill_s = system.price(Parallel()).prefill_s(2000)
    assert 0.5 < found.rate_per_s * prefill_s < 1
    assert 0.9 * found.rate_per_s <= found.good_per_s <= found.rate_per_s


def test_no_goodput_where_no_request_can_meet_the_targets() -> None:
    impossible = Slo(ttft_s=0.001, itl_s=0.05)
    system = BY_NAME["8b-h100"]
    graph = system.graph(HUNDRED, replicas=1, slo=impossible, step_tokens=8192)
    deployment = plan_deployment(graph, beside=GRAPHS)
    found = Search(precision=0.1, requests_min=20).largest(deployment, short_answers, impossible, 1.0)
    assert (found.rate_per_s, found.good_per_s) == (0, 0)


@pytest.mark.parametrize(
    ("name", "parallel"), [("671b-gb200", Parallel(dp=32, ep=32)), ("70b-gb300", Parallel(tp=2))]
)
def test_the_other_engine_is_slower_at_everything(name: str, parallel: Parallel) -> None:
    expected = BY_NAME[name].price(parallel)
    profile = slower_profile(expected, batch_max=5000)
    for point in profile.prefill:
        assert 1.15 < point.seconds / expected.prefill_s(point.new_tokens) < 1.7
    ratios = {
        point.seconds / expected.decode_step_s(point.batch, point.batch * point.context)
        for point in profile.decode
    }
    assert 1.15 < min(ratios) < max(ratios) < 1.7
    assert max(ratios) > 1.05 * min(ratios), "not by one factor"
    assert max(point.batch for point in profile.decode) >= 5000
    model = ProfiledModel(profile, expected)
    assert model.mixed_step_s([(2048, 0)], 1000, 2_000_000) > expected.mixed_step_s(
        [(2048, 0)], 1000, 2_000_000
    )


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("70b-h100-fp8-tp2-x4", "70b-h100"),
        ("671b-h100-tp8-pp2-x2", "671b-h100"),
        ("671b-gb200-nvl72-tp4-x18", "671b-gb200"),
        ("671b-gb300-nvl72-tp2-x36", "671b-gb300"),
    ],
)
def test_shipped_graphs_are_what_the_search_finds(file: str, name: str) -> None:
    role = load(GRAPHS / f"{file}.yaml").roles.aggregated
    system = BY_NAME[name]
    demand = Demand(input_tokens=2048, output_tokens=512, ttft_s=2.0, itl_s=0.05)
    found = place_aggregated(system.price, system.choices(), demand)
    assert role is not None
    assert found is not None
    assert (role.hardware, role.weight_dtype, role.expert_dtype, role.kv_dtype) == (
        system.hardware_name, system.weights, system.experts, system.kv,
    )  # fmt: skip
    assert found.parallel == Parallel(
        tp=role.tensor_parallel, pp=role.pipeline_parallel, dp=role.data_parallel, ep=role.expert_parallel
    )
    assert role.max_running_requests == found.batch


def test_a_quick_run_reports_every_kind_of_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deployments.json"
    arguments = ["bench", "deployments", "--quick", "--only", "8b-h100", "--profiles", str(PROFILES)]
    assert main([*arguments, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    figures = report["figures"]
    tokens_per_s = figures["8b-h100_fast_aggregated_tokens_per_s_per_gpu"]
    assert figures["8b-h100_fast_aggregated_tokens_per_joule"] == pytest.approx(tokens_per_s / 1275)
    usd = figures["8b-h100_fast_aggregated_usd_per_million_tokens"]
    assert usd == pytest.approx(3.0 / 3600 / tokens_per_s * 1e6)
    assert figures["8b-h100_goodput_rps_per_gpu_x8"] > 0
    assert report["config"]["placements"]["8b-h100_fast_aggregated"] == "tp1 batch 75"
    assert "8b-h100 on 8" in capsys.readouterr().err


def test_curves_fall_with_what_each_user_gets() -> None:
    targets = (20, 100)
    samples, placements = curves(targets)
    assert samples.pop("curve_tokens_per_s_per_user") == [20.0, 100.0]
    assert len(samples) == len(placements) == len(WORKLOADS) * len(CALCULATED)
    for slow, fast in samples.values():
        assert slow > fast > 0
    per_gpu = {name: samples[f"curve_1k_1k_{name}_tokens_per_s_per_gpu"] for name in ("h200-host", "gb200")}
    ratios = [wide / host for wide, host in zip(per_gpu["gb200"], per_gpu["h200-host"], strict=True)]
    assert ratios[0] < 10
    assert ratios[1] > 30, "what is claimed of racks holds where each user gets much"


def test_curves_alone(tmp_path: Path) -> None:
    out = tmp_path / "curves.json"
    assert main(["bench", "deployments", "--quick", "--only", "curves", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["figures"] == {}
    assert "curve_8k_1k_gb300-mtp_tokens_per_s_per_gpu" in report["samples"]
    assert "ep" in report["config"]["placements"]["curve_8k_1k_gb300-mtp"][1]


def test_an_unknown_system_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "deployments", "--only", "9b"]) == 2
    assert "no system begins with '9b'; known: 8b-h100" in capsys.readouterr().err


def test_the_router_expects_what_was_measured_and_engines_may_run_on_something_else():
    measured, other = PROFILES / "8b-h100-bf16-tp1.json", PROFILES / "70b-h100-fp8-tp2.json"
    graph = load(GRAPHS / "8b-h100-x8.yaml")
    told = load(GRAPHS / "8b-h100-x8.yaml", Overrides([f"roles.aggregated.profile={measured}"]))
    alone, both, engines_only = (
        plan_deployment(graph, beside=GRAPHS),
        plan_deployment(told, beside=GRAPHS),
        plan_deployment(told, beside=GRAPHS, engine_profile=other),
    )
    point = Profile.load(measured).decode[0]
    engines = [deployment.crews[0].latency for deployment in (both, engines_only)]
    told = [
        deployment.cluster_spec({}).workers[Role.AGGREGATED].prices
        for deployment in (both, engines_only, alone)
    ]
    assert engines[0].decode_step_s(point.batch, point.batch * point.context) == pytest.approx(point.seconds)
    assert told[0] == told[1] != told[2]
    assert engines[1].decode_step_s(1, 256) != engines[0].decode_step_s(1, 256)
