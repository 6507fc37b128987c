"""`penstock simulate` with prefill and decode on workers of their own: agreement of both engines, repetition, refusals."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main
from penstock.core.errors import ConfigError
from penstock.graph import build
from penstock.sim.deployment import plan_deployment
from penstock.sim.report import simulate_graph
from penstock.sim.simulate import simulate
from penstock.sim.workload import WorkloadConfig, make_sessions

ROOT = Path(__file__).parents[3]
GRAPHS = ROOT / "examples" / "graphs"
NODE = [{"host": "node-1"}]


def graph(changes=(), **roles):
    """Make a graph of 8B workers on one host; `roles` says how many of each, `changes` what else is said of a role."""
    common = {"engine": "mock", "hardware": "h100", "max_batch_tokens": 1024, "locations": NODE}
    described = {
        name: common | {"replicas": count} | dict(changes).get(name, {}) for name, count in roles.items()
    }
    topology = {"same_host": {"latency_s": 1e-5, "bandwidth_bytes_per_s": 3e11}}
    return build(
        {
            "model": "llama-3.1-8b",
            "block_size": 64,
            "router": {"topology": topology},
            "roles": described,
            "slo": {"ttft_s": 1.0, "itl_s": 0.05},
        }
    )


def chat(count=80, rate=12.0, seed=1, **fields):
    config = {"input_tokens": 1500, "output_tokens": 60, "length_sigma": 0.6, "turns": 2, "think_s": 2.0}
    return list(
        make_sessions(WorkloadConfig(requests=count, rate_per_s=rate, **config | fields), random.Random(seed))
    )


@pytest.mark.parametrize("roles", [{"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 1, "aggregated": 1}])
def test_both_engines_agree(roles):
    expect_agreement(graph(**roles), chat())


def test_decode_workers_load_from_their_own_tiers_and_receive_less():
    """Conversations whose history has left a small device, in one role; the other role has no tiers."""
    small = {"kv_blocks": 220}
    bare = expect_agreement(graph({"decode": small}, prefill=1, decode=1), chat(turns=3))
    tiered = expect_agreement(
        graph({"decode": small | {"kv": {"host": "8x"}}}, prefill=1, decode=1), chat(turns=3)
    )
    assert sum(bare.onboarded_tokens) == 0
    assert sum(tiered.onboarded_tokens) > 50_000
    received = [recording.counters["decode"].received_bytes for recording in (bare, tiered)]
    assert received[1] < 0.8 * received[0]


def expect_agreement(deployed, sessions):
    """Simulate with both engines and compare the times of all requests; returns the jump engine's recording."""
    recordings = [
        simulate(plan_deployment(deployed, beside=Path(), exact=exact), sessions, seed=1)
        for exact in (False, True)
    ]
    jump, exact = recordings
    assert jump.failed == exact.failed == 0
    order = [np.lexsort((recording.output_tokens, recording.sent_s)) for recording in recordings]
    for name in ("first_token_s", "last_token_s"):
        times = [np.asarray(getattr(r, name))[o] for r, o in zip(recordings, order, strict=True)]
        assert times[0] == pytest.approx(times[1], rel=1e-3)
    assert sorted(jump.cached_tokens) == sorted(exact.cached_tokens)
    return jump


ROLE_KEYS = [
    "workers", "devices", "hardware", "kv_tokens", "prefilled_tokens", "generated_tokens", "kv_hit_ratio",
    "preemptions", "received_bytes", "waiting_requests", "running_requests", "kv_use",
]  # fmt: skip
TOKEN_BYTES = 131_072
"""Of the model's KV: 32 layers, 8 heads of 128, keys and values, two bytes each."""


def test_a_report_says_what_each_role_did_and_what_was_transferred(tmp_path, capsys):
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    shipped = GRAPHS / "70b-h100-fp8-p2d2.yaml"
    spec = tmp_path / "long.yaml"
    spec.write_text(
        "requests: 40\nrate_per_s: 6\ninput_tokens: 3000\noutput_tokens: 150\nlength_sigma: 0.3\n"
    )
    files = ["--json", str(out), "--html", str(page)]
    flags = ["--graph", str(shipped), "--policy", "least-loaded"]  # which sends every prompt away
    assert main(["simulate", str(spec), *flags, *files]) == 0
    report = json.loads(out.read_text())
    assert list(report["roles"]) == ["decode", "prefill"]
    for role in report["roles"].values():
        assert list(role) == ROLE_KEYS
        assert role["workers"] == 2
        assert 0 <= role["kv_use"]["mean"] <= role["kv_use"]["max"] <= 1
    kv_transfer = report["kv_transfer"]
    assert list(kv_transfer) == [
        "remote", "local", "bytes", "second_token_s", "failures", "expired", "refused",
    ]  # fmt: skip
    assert (kv_transfer["remote"], kv_transfer["local"], kv_transfer["failures"]) == (40, 0, {})
    decode, prefill = report["roles"]["decode"], report["roles"]["prefill"]
    assert prefill["generated_tokens"] == 40
    tokens = round(report["output_tokens_per_s"] * report["duration_s"])
    assert decode["generated_tokens"] == tokens - 40
    blocks = kv_transfer["bytes"] / (64 * 163_840)
    assert blocks == int(blocks)
    assert 0 <= prefill["prefilled_tokens"] - 64 * blocks < 64 * 40, "all but a last part of each prompt"
    assert decode["received_bytes"] == kv_transfer["bytes"]
    assert decode["prefilled_tokens"] < (64 + 1) * 40
    text = capsys.readouterr().out
    assert "KV moves at 675 GB/s" in text
    assert "prefill: waiting, mean" in text
    html = page.read_text()
    assert "2 decode workers of 2 h100 and 2 prefill workers of 2 h100" in html
    assert "prefill-0" in html


def test_many_workers_show_by_role(tmp_path):
    spec, page = tmp_path / "chat.yaml", tmp_path / "page.html"
    spec.write_text("requests: 30\nrate_per_s: 6\ninput_tokens: 2000\noutput_tokens: 40\n")
    flags = [f"--set=roles.{role}.replicas=5" for role in ("prefill", "decode")]
    shipped = str(GRAPHS / "70b-h100-fp8-p2d2.yaml")
    assert main(["simulate", str(spec), "--graph", shipped, *flags, "--html", str(page)]) == 0
    html = page.read_text()
    assert "median prefill worker" in html
    assert "median decode worker" in html


def test_a_slow_link_adds_the_last_chunk_to_the_second_token():
    seconds = []
    for link_bytes_per_s in (1e11, 6e9):
        described = graph(prefill=1, decode=1).model_dump(mode="json", exclude_unset=True)
        described["router"] |= {"policy": "least-loaded", "disagg": {"link_bytes_per_s": link_bytes_per_s}}
        workload = chat(10, rate=0.5, turns=1, length_sigma=0, input_tokens=2048, output_tokens=10)
        report = simulate_graph(build(described), workload)
        assert report["kv_transfer"]["bytes"] == 10 * 2048 * TOKEN_BYTES
        seconds.append(report["kv_transfer"]["second_token_s"]["mean"])
    last_chunk_bytes = 1024 * TOKEN_BYTES
    assert seconds[1] - seconds[0] == pytest.approx(last_chunk_bytes * (1 / 6e9 - 1e-11), rel=0.1)
    assert seconds[0] < 0.02


@pytest.mark.parametrize(
    ("changes", "roles", "message"),
    [
        ((), {"prefill": 1, "decode": 0}, "roles.decode.replicas: must be >= 1 to serve anything, got 0"),
        (
            {"decode": {"kv_dtype": "fp8"}},
            {"prefill": 1, "aggregated": 1, "decode": 1},
            "prefill.kv_dtype is 'auto' and decode.kv_dtype is 'fp8'",
        ),
        (
            {"decode": {"kv_blocks": 20}},
            {"prefill": 1, "decode": 1},
            "a decode worker's KV holds 1,280: 20 blocks of 64 tokens (kv_blocks); raise kv_blocks",
        ),
        (
            {"prefill": {"max_batch_tokens": 16, "max_running_requests": 32}},
            {"prefill": 1, "decode": 1},
            "roles.prefill.max_batch_tokens: must be >= max_running_requests",
        ),
        (
            (),
            {"prefill": 600, "decode": 600},
            "roles.prefill.replicas + roles.decode.replicas: 1,200 workers",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic(changes, roles, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        simulate_graph(graph(changes, **roles), chat(4))
