"""A system prompt that all requests share, at three times what one worker could serve, is served by many."""

import random
from pathlib import Path

import numpy as np
import pytest

from penstock.graph import Overrides, load
from penstock.sim.deployment import SimDeployment, plan_deployment
from penstock.sim.simulate import simulate
from penstock.sim.workload import SimPrompt, SimSession, Turn, named, named_units

GRAPHS = Path(__file__).parents[3] / "examples" / "graphs"
SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 8_192, 256, 128
BATCH = 256
REQUESTS = 1_500
pytestmark = pytest.mark.slow


def served_by_one_per_s(deployment: SimDeployment) -> float:
    """Say how many requests a second one worker that has the prefix serves with its batch full."""
    context = SHARED_TOKENS + OWN_TOKENS + OUTPUT_TOKENS // 2
    step_s = deployment.role_groups[0].latency.decode_step_s(BATCH, BATCH * context)
    prefill_s = deployment.role_groups[0].latency.prefill_s(OWN_TOKENS, SHARED_TOKENS)
    return 1 / (step_s * OUTPUT_TOKENS / BATCH + prefill_s)


def hot_sessions(rate_per_s: float) -> list[SimSession]:
    rng = random.Random(1)
    shared = named_units(named(7, 1, 0), SHARED_TOKENS // 64)
    at_s, sessions = 0.0, []
    for number in range(REQUESTS):
        turn = Turn(SHARED_TOKENS + OWN_TOKENS, OUTPUT_TOKENS)
        sessions.append(SimSession(at_s, (turn,), SimPrompt(named(7, 2, number), shared, 64)))
        at_s += rng.expovariate(rate_per_s)
    return sessions


def test_a_prefix_hotter_than_a_worker_can_bear_is_held_by_all_and_starves_none() -> None:
    graph = load(str(GRAPHS / "8b-h100-x8.yaml"), Overrides([]))
    deployment = plan_deployment(graph, beside=GRAPHS)
    sessions = hot_sessions(3 * served_by_one_per_s(deployment))
    recording = simulate(deployment, sessions, seed=1, sample_interval_s=sessions[-1].at_s / 20)
    assert recording.samples is not None
    generated = recording.samples.of("generated_tokens")[-1]
    shares = generated / generated.mean()
    assert recording.failed == 0
    assert shares.min() > 0.8, shares
    assert shares.max() < 1.2, shares
    # Each computes the prefix once, or twice where two came at the same moment.
    computed = np.asarray(recording.prompt_tokens) - np.asarray(recording.cached_tokens)
    assert np.count_nonzero(computed > SHARED_TOKENS) <= 2 * len(shares)
    waits_s = np.asarray(recording.first_token_s) - np.asarray(recording.sent_s)
    whole_s = deployment.role_groups[0].latency.prefill_s(SHARED_TOKENS + OWN_TOKENS)
    assert waits_s.mean() < whole_s / 4
