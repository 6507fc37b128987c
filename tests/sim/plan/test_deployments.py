"""The compared deployments, and engines that differ from their model."""

from pathlib import Path

import pytest

from benchmarks.simulated.deployments import SIMULATED
from penstock.core.types.instances import Role
from penstock.graph import Overrides, load
from penstock.perf.model_shape import Parallel
from penstock.perf.pool import Demand
from penstock.perf.profile import Profile
from penstock.sim.deployment import plan_deployment

ROOT = Path(__file__).parents[3]
GRAPHS, PROFILES = ROOT / "examples" / "graphs", ROOT / "examples" / "profiles"
BY_NAME = {system.name: system for system in SIMULATED}


@pytest.mark.parametrize(
    ("file", "name", "devices"),
    [("671b-h100-tp8-pp2-x2", "671b-h100", 32), ("671b-gb200-nvl72-tp4-x18", "671b-gb200", 72)],
)
def test_shipped_graphs_keep_the_interactive_targets(file: str, name: str, devices: int) -> None:
    role = load(GRAPHS / f"{file}.yaml").roles.aggregated
    system = BY_NAME[name]
    question = system.ask(
        Demand(input_tokens=2048, output_tokens=512, ttft_s=2.0, itl_s=0.05), devices=devices
    )
    assert role is not None
    assert {
        "hardware": role.hardware,
        "weight_dtype": role.weight_dtype,
        "kv_dtype": role.kv_dtype,
    }.items() <= ({"hardware": system.hardware_name} | system.formats).items()
    spread = Parallel(
        tp=role.tensor_parallel, pp=role.pipeline_parallel, dp=role.data_parallel, ep=role.expert_parallel
    )
    assert spread in {layout.role_layouts[0].parallel for layout in question.search().aggregated()}


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
    engines = [deployment.role_groups[0].latency for deployment in (both, engines_only)]
    told = [
        deployment.cluster_spec({}).workers[Role.AGGREGATED].prices
        for deployment in (both, engines_only, alone)
    ]
    assert engines[0].decode_step_s(point.batch, point.batch * point.context) == pytest.approx(point.seconds)
    assert told[0] == told[1] != told[2]
    assert engines[1].decode_step_s(1, 256) != engines[0].decode_step_s(1, 256)
