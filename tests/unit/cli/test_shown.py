"""What commands show of a server's answers."""

import json
from typing import Any

import msgspec
import pytest

from penstock.cli import main
from penstock.cli.ps import DeploymentView, LinkView, table
from penstock.core.types.events import Tier
from penstock.core.types.instances import ReplicaState
from penstock.deploy.control.messages import ProcessView
from penstock.router.explanations import Candidate, PrefillExplanation, RouteReason, RoutingExplanation
from tests.support.answering import Answers, answering

SETTING = "local_tokens_max"
FRONTEND = ProcessView(name="frontend-1", pid=1, state=ReplicaState.READY)


@pytest.fixture(autouse=True)
def _private_state(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))


def shown(capsys, answer, *words, code=0):
    """Run a command against a server with this answer; returns the lines of both outputs."""
    with answering(Answers(lambda _path: answer)) as server:
        assert main([*words, "--url", server.url]) == code
    return "".join(capsys.readouterr()).splitlines()


def candidate(worker="w1", cost=1.0, **fields: Any):
    usual = {"terms": {}, "overlap_blocks": 0, "tier_blocks": dict.fromkeys(Tier, 0)}
    return Candidate(worker=worker, cost=cost, **usual | fields)


def explained(capsys, **fields: Any):
    """Show a decision between no others than the worker chosen."""
    usual = {
        "request_id": "a", "model": "m", "adapter": None, "policy": "random", "reason": RouteReason.ONLY_WORKER,
        "unit": "none", "worker": "w1", "next_worker": None, "request_tokens": 20, "request_blocks": 2,
        "block_size": 16, "age_s": 0.0, "num_candidates": 1, "candidates": (candidate(),), "num_left_out": 0,
        "left_out": (),
    }  # fmt: skip
    body = msgspec.json.encode({"pid": 7, "decisions": [RoutingExplanation(**usual | fields)]})
    return shown(capsys, body, "explain", "a")


@pytest.mark.parametrize(
    ("tokens", "blocks", "said"),
    [(1, 1, "1 token, 1 block of 16"), (20, 2, "20 tokens, 2 blocks of 16")],
)
def test_the_size_of_a_prompt_reads_well(capsys, tokens, blocks, said):
    _, prompt, *_ = explained(capsys, request_tokens=tokens, request_blocks=blocks)
    assert prompt == f"to w1 (only_worker), next nobody; {said}"


@pytest.mark.parametrize(
    ("prefill", "said"),
    [
        (
            PrefillExplanation(
                remote=True, local=50.6, prefill=45.83, decode=18.5, kv_transfer=5.0, local_worker="decode-1",
                prefill_worker="prefill-1", decode_worker="decode-1", setting=SETTING,
            ),
            "prefill worker: prefill-1 45.8 + decode-1 13.5 + KV transfer 5.0 = 64.3 ms; alone on decode-1 50.6 ms, by router.disagg.local_tokens_max",
        ),
        (PrefillExplanation(remote=False, local=66.0, prefill=40.8, decode=36.6), "where the answer is: prefill 40.8 + decode 36.6 = 77.4 ms; alone on one worker 66.0 ms"),
        (
            PrefillExplanation(remote=True, local=66.0, prefill=40.8, decode=3.6, link_setup=25.0),
            "prefill worker: prefill 40.8 + decode 28.6 (25.0 of it for a new link) = 69.4 ms; alone on one worker 66.0 ms",
        ),
        (PrefillExplanation(remote=True), "prefill worker: not compared by cost"),
        (PrefillExplanation(remote=False, local=5.0), "where the answer is: too little of it is to be computed"),
    ],
)  # fmt: skip
def test_where_the_prompt_is_computed_is_said(capsys, prefill, said):
    _, _, line, *_ = explained(capsys, unit="ms", prefill=prefill)
    assert line.startswith("prompt ")
    assert line.endswith(said)


@pytest.mark.parametrize(
    ("cost", "terms", "said"),
    [(0.0123, {}, "0.0123"), (123456.0, {}, "1.235e+05"), (12.34, {"queue": 12.34}, "12.3"), (None, {}, "never")],
)  # fmt: skip
def test_numbers_of_any_size_are_read(capsys, cost, terms, said):
    *_, row = explained(capsys, candidates=(candidate(cost=cost, terms=terms),))
    assert row.split()[:2] == ["w1", said]


def test_both_workers_of_a_plan_are_shown_with_the_alternatives(capsys):
    candidates = (candidate("p0", 1.5), candidate("p1", 2.0))
    prefill = PrefillExplanation(
        remote=True, worker="p0", next_worker="p1", reason=RouteReason.NO_PREFIX, num_candidates=3, candidates=candidates,
    )  # fmt: skip
    _, to, _, prompt, _, first, second, more, answer, _, last = explained(capsys, prefill=prefill)
    assert to.startswith("to w1 (only_worker)")
    assert prompt == "prompt to p0 (no_prefix), next p1"
    assert (first.split()[:2], second.split()[:2]) == (["p0", "1.5"], ["p1", "2"])
    assert (more, answer) == ("  and 1 more", "answer by w1")
    assert last.split()[0] == "w1"


@pytest.mark.parametrize(
    ("prefill", "name"), [(PrefillExplanation(remote=True), "to move"), (None, "object")]
)
def test_blocks_that_a_kv_transfer_brings_are_to_move(capsys, prefill, name):
    tiers = {**dict.fromkeys(Tier, 0), Tier.OBJECT: 4}
    *_, head, _ = explained(
        capsys, candidates=(candidate(overlap_blocks=4, tier_blocks=tiers),), prefill=prefill
    )
    assert head.endswith(f"cached  {name}")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("refusal", [None, "worker-2: engine vllm has no KV cache that operators can manage"])
def test_the_status_of_kv_is_1_where_a_worker_refuses(capsys, refusal, as_json):
    workers = [{"worker": "worker-1", "blocks": 7}, {"worker": "worker-2", "problem": refusal}]
    answer = {"workers": workers if refusal else workers[:1]}
    said = shown(capsys, answer, "kv", "flush", *["--json"] * as_json, code=1 if refusal else 0)
    texts = ["worker-1: 7 blocks flushed", *([refusal] if refusal else [])]
    assert said == ([json.dumps(answer)] if as_json else texts)


@pytest.mark.parametrize(
    ("models", "wanted", "said"),
    [
        (["one", "two"], "three", "model 'three': the server has one, two"),
        ([], "one", "no worker there serves a model now"),
        ([], None, "no worker there serves a model now"),
    ],
)
def test_chat_says_which_models_there_are(capsys, models, wanted, said):
    flags = () if wanted is None else ("--model", wanted)
    answer = {"data": [{"id": model} for model in models]}
    (line,) = shown(capsys, answer, "chat", "Hello?", *flags, code=1)
    assert said in line


def listed(**fields):
    return list(table([DeploymentView(name="demo", state="running", directory="d", **fields)]))[1:]


def test_ps_says_how_far_a_region_is_once_it_is_measured():
    link = ProcessView(name="link-eu", pid=2, state=ReplicaState.READY, region="eu")
    frontend, far = listed(processes=(FRONTEND, link), links=(LinkView("eu", "ready", 0.0812, 2, 1),))
    assert "away" not in frontend
    assert "81.2 ms away, 1 of 2 frontends" in far
    unknown = listed(processes=(FRONTEND, link), links=(LinkView("eu", "connecting", 0.0, 1, 0),))
    assert not any("away" in line for line in unknown)
