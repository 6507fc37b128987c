"""An object tier below a real vLLM on a real S3 server over HTTP, which is killed while blocks are loaded from it."""

import os
from pathlib import Path

import pytest
import torch
from s3_server import S3Server, proxy_before
from transformers import AutoModelForCausalLM

from penstock.core.types.events import Holder, Tier
from tests.vllm.indexed import Indexed
from tests.vllm.test_engine import greedy
from tests.vllm.test_engine import prompt as random_prompt
from tests.vllm.test_kv_tiers import BLOCKS, CACHED, LENGTH, TOKENS, counts_of, evict, tiers

pytestmark = pytest.mark.nightly

LOADS_BEFORE_DEATH = 2
PROMPTS = [random_prompt(LENGTH, 3000 + seed) for seed in range(4)]


@pytest.fixture(scope="module")
def model(model_dir):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture
def s3():
    venv = Path(os.environ.get("PENSTOCK_VENV", ".venv"))  # vLLM's environment has no S3 server
    server = S3Server(str(venv / "bin" / "python"))
    yield server
    server.kill()


def test_blocks_come_over_http_and_a_server_killed_meanwhile_changes_no_token(
    started, spec_of, s3, monkeypatch, model
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    expected = [greedy(model, ids, TOKENS) for ids in PROMPTS]
    with proxy_before(s3) as proxy:
        options = {"endpoint": proxy.url}
        store = {"url": "s3://bucket/fleet", "refresh_s": 0.5, "pack_size": "1MiB", "options": options}
        spec = spec_of(**tiers(object=store))
        first = Indexed(started(spec))
        second = Indexed(started(spec, beside=True))
        for ids, tokens in zip(PROMPTS, expected, strict=True):
            first.run(ids, tokens=TOKENS)
            assert first.emitted == [tokens]
        second.wait_until(lambda load: load.kv_tiers[0].cached_blocks >= len(PROMPTS) * BLOCKS)
        second.wait_until(lambda _: all(second.known(ids) == CACHED for ids in PROMPTS))  # idle, and it tells
        assert second.holders == {Holder.FLEET}

        def run_until(holds, seed):
            """Run the prompts until the tier's counts are so: what a busy machine loads too slowly is computed, and tried again later."""
            for turn in range(60):
                second.run(*PROMPTS, tokens=TOKENS)
                assert second.emitted == expected
                counts = counts_of(second, Tier.OBJECT)
                if holds(counts):
                    return counts
                evict(second, seed + 10 * turn)
            pytest.fail(f"{counts} after {turn + 1} turns")

        gets = proxy.seen.count("GET")
        loaded = run_until(lambda counts: counts.loaded_blocks >= len(PROMPTS) * BLOCKS, 10_000)
        assert proxy.seen.count("GET") - gets >= len(PROMPTS), "the blocks came over HTTP"
        evict(second, 3100)

        left = LOADS_BEFORE_DEATH

        def die(method):
            nonlocal left
            left -= method == "GET"
            if left == 0:
                s3.kill()

        proxy.before = die
        # killed while a request's load, or the tier that measures its speed, asks for blocks
        dead = run_until(
            lambda counts: left <= 0 and (counts.is_off or counts.missing_blocks > loaded.missing_blocks),
            20_000,
        )
        proxy.before = lambda _method: None
        evict(second, 3200)
        second.run(*PROMPTS, tokens=TOKENS)
        assert second.emitted == expected, "also while the server stays away"

        s3.start()  # empty
        evict(second, 3300)
        # what was stored anew is loaded again
        last = run_until(lambda counts: counts.loaded_blocks > dead.loaded_blocks, 30_000)
        assert (last.corrupt_blocks, last.is_off) == (0, False)
