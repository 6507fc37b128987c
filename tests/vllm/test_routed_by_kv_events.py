"""`penstock serve --engine vllm --workers 2`: a prompt goes to the worker whose vLLM told that it has it."""

import tempfile
import time

import httpx
import psutil
import pytest

from benchmarks.processes.served import served
from tests.vllm.conftest import BLOCK, vllm_processes
from tests.vllm.test_engine import prompt


@pytest.fixture(scope="module")
def site(model_dir):
    sizes = {
        "block_size": BLOCK,
        "roles.aggregated.kv_blocks": 64,
        "roles.aggregated.weight_dtype": "float32",
    }
    flags = [f"--set={name}={value}" for name, value in sizes.items()]
    command = (str(model_dir), "--engine", "vllm", "--engine-arg", "enforce_eager=true", "--workers", "2")
    with tempfile.TemporaryDirectory(prefix="vllm-") as name, pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", name)
        environment.setenv("PENSTOCK_STATE_DIR", name)
        with (
            served(*command, *flags) as deployment,
            httpx.Client(base_url=deployment.url, timeout=120) as http,
        ):
            yield deployment, http
    psutil.wait_procs(vllm_processes(), timeout=20)
    assert not vllm_processes()


def test_prompts_go_where_they_are_cached(site):
    deployment, http = site

    def cached(ids, **fields):
        body = {
            "model": deployment.model,
            "prompt": ids,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
        }
        usage = http.post("/v1/completions", json=body | fields).raise_for_status().json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def metric(name):
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"penstock_router_{name}"))

    def until(name, value):
        """Wait until a metric is so high: KV events come after the answers of their requests."""
        end_s = time.monotonic() + 60
        while metric(name) < value:
            assert time.monotonic() < end_s, f"{name}: {metric(name)} of {value}"
            time.sleep(0.1)

    prompts = [prompt(100, 900 + number) for number in range(6)]
    assert [cached(ids) for ids in prompts] == [0] * 6
    until("indexed_blocks", 6 * 3)
    assert [cached(ids) for ids in prompts] == [96] * 6
    assert cached(prompts[0], cache_salt="other") == 0
    until("indexed_blocks", 7 * 3)
    assert cached(prompts[0], cache_salt="other") == 96
    assert metric("expected_hit_tokens_total") == 7 * 96, "the index knew all of it"
    assert metric("predicted_hit_tokens_total") == 0, "and nothing was guessed"
    until("kv_events_total", 7)
