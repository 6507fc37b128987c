"""The place of KV tiers in a real vLLM: a connector beside NixlConnector that counts what tiers would be asked."""

import pytest

from penstock.core.types.instances import Role
from penstock.core.types.requests import FinishReason
from tests.vllm.test_engine import prompt, request_of

CHILDREN = [
    {
        "kv_connector": "NixlConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "penstock.engine.vllm.nixl_connector",
    },
    {
        "kv_connector": "CountingConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "penstock.engine.vllm.counting_connector",
    },
]  # fmt: skip
CONFIG = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": CHILDREN},
}


@pytest.fixture(scope="module")
def counted(started, spec_of):
    return started(spec_of(role=Role.PREFILL, args={"kv_transfer_config": CONFIG}))


def test_it_counts_what_a_tier_would_be_asked_and_could_store(counted):
    totals = counted.engine.connectors.totals
    counted.answers(request_of(prompt(100, 500), max_tokens=30))
    assert totals["asked_requests"] == 1
    assert totals["asked_tokens"] == 100
    assert totals["full_blocks"] == 4, "three of the prompt, one while tokens were added"
    assert totals["loaded_tokens"] == 0
    assert totals["saved_layers"] == 30 * 4, "each step's layers"
    counted.answers(request_of(prompt(100, 500), max_tokens=1))
    assert totals["asked_tokens"] == 104, "of the second, vLLM's own cache has three blocks"


def test_nixl_hands_over_beside_it(counted):
    answer = counted.answers(request_of(prompt(70, 501), max_tokens=1, prefill_only=True))[0]
    assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.LENGTH)
    assert (answer.last.kv.num_tokens, bool(answer.last.kv.payload)) == (70, True)
