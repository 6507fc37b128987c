"""Routing to workers that send no KV events, beside the same workers that do."""

import json

from penstock.cli import main

SPEC = """
requests: 200
rate_per_s: 8
input_tokens: 900
output_tokens: 40
turns: 3
think_s: 2
shared_prefix_tokens: 1024
prefix_groups: 6
"""
GRAPH = """
model: llama-3.1-8b
roles: {aggregated: {replicas: 4, engine: mock, hardware: h100}}
"""


def test_without_evictions_guesses_find_nearly_what_events_find(tmp_path):
    (tmp_path / "chat.yaml").write_text(SPEC)
    (tmp_path / "graph.yaml").write_text(GRAPH)
    hits = {}
    for name, settings in {
        "exact": [],
        "approximate": ["--set", "worker.kv_events=false"],
        "forgetful": ["--set", "worker.kv_events=false", "--set", "router.predicted_s=0.01"],
    }.items():
        out = tmp_path / f"{name}.json"
        command = ["simulate", str(tmp_path / "chat.yaml"), "--graph", str(tmp_path / "graph.yaml")]
        assert main([*command, *settings, "--json", str(out)]) == 0
        report = json.loads(out.read_text())
        assert report["failed"] == 0
        hits[name] = report["kv_hit_ratio"]
    assert hits["exact"] > 0.3
    assert hits["approximate"] > 0.95 * hits["exact"]
    assert hits["forgetful"] < hits["approximate"] - 0.05, "or the guesses made no difference"
