"""Capacities of a graph's roles, and what the planner refuses."""

import json

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.demo import MODEL_DIR
from penstock.graph import build
from penstock.graph.capacities import cost_of, is_predicted, make_capacity
from penstock.perf.profile import DecodePoint, PrefillPoint, Profile
from penstock.planner.demand import ExpectedDemand, SloTargets

EXPECTED = ExpectedDemand(rate_per_s=1.0, input_tokens=100, output_tokens=50)
SLO = SloTargets(ttft_s=1.0, itl_s=0.05, percentile=90.0)


def graph_of(planner=None, **roles):
    return build({"model": "demo", "roles": roles, "planner": planner})


def capacity(role="aggregated", model_dir=MODEL_DIR, planner=None, **settings):
    graph = graph_of(planner, **{role: settings, **({"prefill": {}} if role == "decode" else {})})
    spec = graph.roles.present()[Role(role)]
    return make_capacity(
        Role(role),
        spec,
        model_dir=model_dir,
        block_size=graph.block_size,
        budget=graph.planner and graph.planner.budget,
    )


def test_a_mock_engine_is_as_fast_as_its_settings():
    timing = {"step_s": 0.01, "decode_s_per_request": 0.001, "decode_s_per_context_token": 0.0}
    one = capacity(engine="mock", mock={"timing": timing}, kv_blocks=64)
    assert one.model.decode_step_s(5, 0) == pytest.approx(0.015)
    assert one.model.kv_capacity_tokens == 64 * 16
    assert (one.max_batch_tokens, one.requests_max) == (512, 64)
    twice = capacity(engine="mock", mock={"timing": timing, "speedup": 2.0})
    assert twice.model.decode_step_s(5, 0) == pytest.approx(0.0075)
    assert twice.rate_per_s(1, EXPECTED, SLO) > one.rate_per_s(1, EXPECTED, SLO)


def test_a_batch_that_is_full_bounds_the_rate():
    slow = {"mock": {"timing": {"step_s": 0.02}}, "engine": "mock"}
    few, many = (capacity(**slow, max_running_requests=n) for n in (4, 64))
    # Four requests of 50 steps of 20 ms: four a second at most.
    assert 1.0 < few.rate_per_s(1, EXPECTED, SLO) < 4.0
    assert many.rate_per_s(1, EXPECTED, SLO) > 5 * few.rate_per_s(1, EXPECTED, SLO)


def test_a_profile_counts_before_the_data_sheet(tmp_path):
    Profile(
        engine="mock",
        prefill=(PrefillPoint(new_tokens=100, seconds=0.1), PrefillPoint(new_tokens=400, seconds=0.4)),
        decode=(
            DecodePoint(batch=1, context=100, seconds=0.03),
            DecodePoint(batch=8, context=100, seconds=0.04),
        ),
    ).save(tmp_path / "p.json")
    found = capacity(profile=str(tmp_path / "p.json"))
    assert found.model.decode_step_s(1, 100) == pytest.approx(0.03)
    assert not is_predicted(graph_of(aggregated={"profile": str(tmp_path / "p.json")}).roles.aggregated)
    assert is_predicted(graph_of(aggregated={}).roles.aggregated)


def test_without_a_profile_the_data_sheet_counts():
    found = capacity()
    assert found.rate_per_s(1, EXPECTED, SLO) > 0
    assert found.model.kv_capacity_tokens == pytest.approx(2**30 / 1280, rel=0.01), "1 GiB of KV on a CPU"


def test_a_model_whose_speed_nobody_knows_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    with pytest.raises(
        ConfigError, match=r"roles\.aggregated: step times cannot be predicted: .*penstock profile"
    ):
        capacity(model_dir=tmp_path)


@pytest.mark.parametrize(("budget", "cost"), [({"gpus": 9}, 2), ({"usd_per_hour": 9.0}, 6.0)])
def test_a_worker_costs_what_its_devices_do(budget, cost):
    role = {"hardware": "h100", "tensor_parallel": 2, "engine": "mock"}
    graph = graph_of({"budget": budget}, aggregated=role)
    assert cost_of(graph.roles.aggregated, graph.planner.budget) == cost
    assert capacity(planner={"budget": budget}, **role).cost == cost
