"""Roles whose workers span nodes: what a graph may say of them."""

import pytest

from penstock.core.errors import ConfigError
from penstock.graph import build

WIDE = {"engine": "vllm", "hardware": "h100", "tensor_parallel": 16, "nodes": 2}


def test_a_worker_has_equal_parts_of_its_devices_on_each_node() -> None:
    role = build({"model": "m", "roles": {"aggregated": WIDE}}).roles.aggregated
    assert role is not None
    assert (role.devices, role.devices_per_node) == (16, 8)


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ({"aggregated": WIDE | {"engine": "trtllm"}}, "nodes: a worker of engine 'trtllm' is on one node, got 2; use mock, vllm or sglang, or"),
        ({"aggregated": WIDE | {"tensor_parallel": 9}}, "nodes: 9 devices .* are no equal parts on 2 nodes"),
        ({"aggregated": WIDE | {"data_parallel": 2}}, "nodes: data-parallel ranks of one worker are on one node, got data_parallel 2"),
        ({"aggregated": WIDE | {"engine": "sglang", "data_parallel": 8, "expert_parallel": 8}}, "nodes: data-parallel ranks of one worker"),
        ({"aggregated": WIDE | {"kv": {"host": "8GiB"}}}, r"nodes: KV tiers \(host\) are of one node"),
        ({"prefill": WIDE, "decode": WIDE | {"nodes": 1}}, "prefill.nodes: a worker of engine 'vllm' over 2 nodes transfers no KV"),
    ],
)  # fmt: skip
def test_what_no_nodes_could_run_is_refused(roles: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build({"model": "m", "roles": roles})
