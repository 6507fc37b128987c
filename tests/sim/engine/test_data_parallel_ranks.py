"""A simulated worker with data-parallel ranks: each has a budget of its own, and a prompt runs on one of them."""

from pathlib import Path

import numpy as np
import pytest

from penstock.graph import build
from penstock.sim.deployment import SimDeployment, plan_deployment
from penstock.sim.report import latencies_s
from penstock.sim.simulate import simulate
from penstock.sim.trace import TraceRow
from penstock.sim.workload import trace_sessions


def wide(*, exact: bool = False, **settings: int) -> SimDeployment:
    """Give the deployment of one worker of DeepSeek-R1's shape on eight H200, a copy of the attention each."""
    role = {
        "engine": "mock", "hardware": "h200", "data_parallel": 8, "expert_parallel": 8, "weight_dtype": "fp8",
        "max_batch_tokens": 8192, "max_running_requests": 32,
    }  # fmt: skip
    graph = {
        "name": "wide",
        "model": "deepseek-r1",
        "block_size": 64,
        "roles": {"aggregated": role | settings},
    }
    return plan_deployment(build(graph), beside=Path(), exact=exact)


def measured_s(
    deployment: SimDeployment, *lengths: int, output_tokens: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Give the times to the first token and to the last, sorted, of prompts that come at once."""
    rows = [TraceRow(0.0, length, output_tokens, ()) for length in lengths]
    recording = simulate(deployment, trace_sessions(rows, seed=0), seed=0)
    ttft_s, _, e2e_s = latencies_s(recording)
    assert len(ttft_s) == len(lengths)
    return np.sort(ttft_s), np.sort(e2e_s)


def test_prompts_that_come_at_once_are_computed_at_once_on_a_rank_each() -> None:
    deployment = wide()
    step_s = deployment.role_groups[0].latency.prefill_batch_s([(8192, 0)] * 8)
    eight, sixteen = (measured_s(deployment, *[8192] * count)[0] for count in (8, 16))
    assert eight.max() < 2.1 * step_s, "the first may have a step of its own"
    assert eight.max() + 0.8 * step_s < sixteen.max() < 3.1 * step_s


def test_a_long_prompt_is_cut_to_its_ranks_budget_and_does_not_hold_up_the_others() -> None:
    lengths = (100_000, *[500] * 20)
    *others, longest = measured_s(wide(max_batch_tokens=1024), *lengths)[0]
    assert longest > 5
    assert max(others) < 0.1 * longest
    at_once = measured_s(wide(max_batch_tokens=100_000), *lengths)[0]
    assert max(at_once[:-1]) > 2 * max(others)


def test_it_jumps_as_it_steps() -> None:
    lengths = (30_000, 9_000, *[700] * 30, 12_000)
    jump, exact = (
        measured_s(
            wide(exact=exact, max_batch_tokens=512, max_running_requests=3), *lengths, output_tokens=50
        )
        for exact in (False, True)
    )
    assert jump[0] == pytest.approx(exact[0], rel=1e-3)
    assert jump[1] == pytest.approx(exact[1], rel=1e-3)
