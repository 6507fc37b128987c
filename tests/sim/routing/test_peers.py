"""Simulated workers load from each other's devices, with the classes of real ones: what a policy moves about is not computed again."""

from pathlib import Path

import numpy as np
import pytest

from penstock.graph import Overrides, load
from penstock.sim.deployment import plan_deployment
from penstock.sim.simulate import simulate
from penstock.sim.workload.prompt import Prompt, named
from penstock.sim.workload.workload import Session, Turn

GRAPHS = Path(__file__).parents[3] / "examples" / "graphs"
TURNS, PROMPT_TOKENS, MORE_TOKENS = 5, 4_096, 256


def sessions(count, interval_s):
    turns = tuple(Turn(PROMPT_TOKENS + number * MORE_TOKENS, 32) for number in range(TURNS))
    return [Session(number * interval_s, turns, Prompt(named(7, number))) for number in range(count)]


def simulated(**settings):
    changes = [("router.policy", "round-robin"), *settings.items()]
    graph = load(str(GRAPHS / "8b-h100-x8.yaml"), Overrides([f"{path}={value}" for path, value in changes]))
    recording = simulate(plan_deployment(graph, beside=GRAPHS), sessions(24, 0.5), seed=1)
    assert recording.failed == 0
    waits_s = np.asarray(recording.first_token_s) - np.asarray(recording.sent_s)
    return waits_s.mean(), sum(recording.cached_tokens) / sum(recording.prompt_tokens)


@pytest.mark.slow
def test_moved_sessions_load_what_others_have_and_a_slow_link_changes_nothing():
    alone_s, alone = simulated()
    peers = {"worker.kv_transfer.peers": "true"}
    peers_s, share = simulated(**peers, **{"router.disagg.link_bytes_per_s": "4e10"})
    slow_s, slow_share = simulated(**peers, **{"router.disagg.link_bytes_per_s": "1e9"})
    assert share > alone + 0.3
    assert peers_s < 0.7 * alone_s
    assert slow_share == alone
    assert slow_s == pytest.approx(alone_s, rel=0.01)
