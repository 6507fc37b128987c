"""KV that moves while its prompt is computed, between real processes: exact, and held for nobody who is gone."""

import asyncio
import os
import signal

import aiohttp
import pytest

pytestmark = pytest.mark.slow

PROMPT = "Which parts does a request pass on its way, and what does each of them do with it? " * 8
TOKENS = 24
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}
CHUNKED = {"replicas": 1, "max_batch_tokens": 64, "max_running_requests": 16}
STREAMED = {"kv_transfer": {"stream_kv": True}}


def test_a_worker_killed_while_a_prompt_is_computed_is_not_noticed(deploy, one_worker):
    victims = ("decode", "prefill")
    prompts = [f"{number} {PROMPT * 4}" for number in range(len(victims))]
    whole = []

    async def alone(site):
        whole.extend([(await site.tell(prompt, max_tokens=TOKENS))[0] for prompt in prompts])

    async def disaggregated(site):
        async def all_back():
            return await site.ready_workers() == 4

        seen, early = set(), []
        for victim, prompt, expected in zip(victims, prompts, whole, strict=True):
            used = {}

            async def the_decode_worker_expects_it(used=used):
                """Both are chosen at once, and the decode worker says that a request is about to come."""
                async with site.http.get(f"{site.url}/admin/explain?last=1") as response:
                    decisions = (await response.json())["decisions"]
                if not decisions or decisions[-1]["request_id"] in seen:
                    return False
                last = decisions[-1]
                used.update(decode=last["worker"], prefill=last["prefill"]["worker"])
                if (await site.load(used["decode"]))["waiting_requests"] == 0:
                    return False
                seen.add(last["request_id"])
                return True

            texts = []

            async def read(prompt=prompt, texts=texts):
                async for chunk in site.stream(prompt, max_tokens=TOKENS):
                    texts.append(site.text_of(chunk))

            async with asyncio.TaskGroup() as group:
                group.create_task(read())
                await site.until(the_decode_worker_expects_it)
                early.append("".join(texts) == "")
                site.kill(used[victim])
            assert "".join(texts) == expected
            if victim == "decode":  # there are two of each, of which one may be away
                await site.until(all_back)
        assert any(early), "a prompt was still computed"

    paged = CHUNKED | {"engine": "paged", "weight_dtype": "float32"}
    two = paged | {"replicas": 2}
    one_worker(alone)
    deploy(
        disaggregated, roles={"prefill": two, "decode": two}, router=ALWAYS, worker=STREAMED, timeout_s=400
    )


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
