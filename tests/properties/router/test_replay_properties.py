"""Whatever a policy was asked, its recorded inputs have it answer the same."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines import BASELINES
from penstock.router.policies import POLICIES, make_policy
from penstock.router.replay import EVENT, RoutingReplay, record_context
from penstock.router.selector import WorkerSelector
from penstock.testing.routing_policy import some_contexts

SLOTS_MAX = 17


@pytest.mark.parametrize("policy", [*POLICIES, *BASELINES.values()])
@given(seed=st.integers(0, 1 << 32), tie=st.integers(0, (1 << 64) - 1))
@settings(max_examples=3, deadline=None)
def test_the_same_inputs_get_the_same_choice(policy: str, seed: int, tie: int) -> None:
    selector, lines, expected = WorkerSelector(make_policy(policy)), [], []
    for context in some_contexts(seed):
        if len(context.eligible) > SLOTS_MAX or not context.eligible.any():
            continue
        slot = selector.choose(context, tie).slot
        selector.chosen(context, slot)
        expected.append(f"w{slot}")
        line = {
            "event": EVENT,
            "request_id": str(len(lines)),
            "model": "m",
            "policy": policy,
            "worker": f"w{slot}",
            "slot": slot,
            "tie": tie,
            "workers": [f"w{number}" for number in range(len(context.eligible))],
            "context": record_context(context),
        }
        lines.append(json.dumps(line))
    assert [replayed.again for replayed in RoutingReplay().run(lines)] == expected
