"""aiperf and guidellm with their own defaults: every request is answered, with the tokens that were asked for."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.processes.served import Served
from penstock.demo import MODEL_DIR
from tests.support.clients import run_command

REQUESTS, TOKENS = 6, 8


@pytest.mark.slow
@pytest.mark.needs("aiperf clients")
@pytest.mark.parametrize(
    "endpoint",
    ["chat", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("responses", "messages"))],
)
def test_aiperf(demo: Served, tmp_path: Path, endpoint: str) -> None:
    flags = {
        "model": demo.model,
        "url": demo.url,
        "endpoint-type": endpoint,
        "tokenizer": str(MODEL_DIR),
        "concurrency": "2",
        "request-count": str(REQUESTS),
        "synthetic-input-tokens-mean": "20",
        "output-tokens-mean": str(TOKENS),
        "extra-inputs": "ignore_eos:true",
        "ui": "none",
        "output-artifact-dir": str(tmp_path),
    }
    arguments = [
        "profile",
        "--streaming",
        *(part for name, value in flags.items() for part in (f"--{name}", value)),
    ]
    said = asyncio.run(run_command("aiperf", arguments, command="aiperf", folder=tmp_path, timeout_s=300))
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS, said
    assert not found["error_summary"], said
    assert found["time_to_first_token"]["avg"] > 0
    assert found["output_sequence_length"]["avg"] <= TOKENS + 1


@pytest.mark.slow
@pytest.mark.needs("evals clients")
def test_guidellm(demo: Served, tmp_path: Path) -> None:
    flags = {
        "backend": f"kind=openai_http,target={demo.url},model={demo.model}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={MODEL_DIR}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}",
        "output": f"kind=json,path={tmp_path / 'out.json'}",
    }
    arguments = [
        "run",
        "--disable-console",
        *(part for name, value in flags.items() for part in (f"--{name}", value)),
    ]
    said = asyncio.run(run_command("evals", arguments, command="guidellm", folder=tmp_path, timeout_s=300))
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0), said
    answered = benchmark["requests"]["successful"]
    assert {request["output_metrics"]["text_tokens"] for request in answered} == {TOKENS}, said
