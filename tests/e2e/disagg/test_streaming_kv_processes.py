"""KV that moves while its prompt is computed, between real processes: exact, and held for nobody who is gone."""

import os
import signal

import aiohttp
import pytest

pytestmark = pytest.mark.slow

PROMPT = "Which parts does a request pass on its way, and what does each of them do with it? " * 8
TOKENS = 24
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}
CHUNKED = {"replicas": 1, "max_batch_tokens": 64, "max_running_requests": 16}


def test_what_is_held_for_a_frontend_that_was_killed_is_free_long_before_its_time_is_up(deploy):
    async def scenario(site):
        await site.tell("Hello", max_tokens=2)  # the frontend has fetched the tokenizer, from whoever
        decode = site.deployment.pids()["decode-1"]
        os.kill(decode, signal.SIGSTOP)  # it fetches nothing
        try:

            async def is_held():
                return (await site.load("prefill-1")).get("active_blocks", 0) > 0

            async def is_free():
                try:
                    return (await site.load("prefill-1"))["active_blocks"] == 0
                except (aiohttp.ClientError, KeyError):
                    return False  # the frontend is not back

            asking = site.stream(PROMPT, max_tokens=TOKENS)
            await anext(asking)
            await site.until(is_held)
            site.kill("frontend-1")
            await site.until(is_free)
        finally:
            os.kill(decode, signal.SIGCONT)

    mock = CHUNKED | {"engine": "mock"}
    deploy(
        scenario,
        roles={"prefill": mock, "decode": mock},
        router=ALWAYS,
        worker={"kv_transfer": {"stream_kv": True, "pin_ttl_s": 300}},
        supervision={"spare_processes": 0, "liveness_timeout_s": 300},
        timeout_s=240,
    )
