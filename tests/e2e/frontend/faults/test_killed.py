"""The frontend is killed while the paged engine's real KV is transferred: workers stop, let go of all of it, and go on exactly."""

import asyncio
import os
import signal
from contextlib import aclosing

import aiohttp
import openai
import pytest

pytestmark = pytest.mark.slow

ASKED = "Which parts does a request pass on its way, and what does each of them do with it? "
LONG = 36
"""So often asked, a prompt takes dozens of steps."""
TOKENS = 1500
"""More than is answered before the kill is noticed."""
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}
ROLE = {"replicas": 1, "engine": "paged", "max_batch_tokens": 64}
WORKERS = ("prefill-1", "decode-1")


async def loads(site, names=WORKERS):
    """What these workers say, as soon as a frontend answers that knows them."""
    try:
        workers = await site.workers()
    except aiohttp.ClientError:
        return None
    found = {name: workers[name]["load"] for name in names if name in workers and workers[name]["load"]}
    return found if len(found) == len(names) else None


async def until_free(site, names=WORKERS):
    """Wait until they have no request, and no block is held by whatever: pins and fetches count among the active ones."""

    async def holds():
        now = await loads(site, names)
        held = ("running_requests", "waiting_requests", "active_blocks")
        return now is not None and not any(load[name] for load in now.values() for name in held)

    await site.until(holds)


async def until_held(site):
    """Wait until the prefill worker says that a prompt's blocks are held, though it has nothing to compute."""

    async def holds():
        load = (await loads(site))["prefill-1"]
        return load["active_blocks"] > 0 and load["running_requests"] == load["waiting_requests"] == 0

    await site.until(holds)


async def until_computed(site, before, *, tokens):
    """Wait until the prefill worker has computed some more tokens, and holds blocks."""

    async def holds():
        load = (await loads(site))["prefill-1"]
        return load["prefilled_tokens"] - before["prefilled_tokens"] >= tokens and load["active_blocks"] > 0

    await site.until(holds)


@pytest.mark.parametrize("stream_kv", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_workers_stop_and_hold_nothing_and_its_successor_gets_exact_answers(deploy, stream_kv):
    async def scenario(site):
        shorter = {moment: f"{moment} {ASKED * 4}" for moment in ("first token", "decoding")}
        whole = {moment: (await site.tell(prompt, max_tokens=24))[0] for moment, prompt in shorter.items()}

        long = ASKED * LONG
        before = await loads(site)
        asking = asyncio.ensure_future(site.tell(long, max_tokens=24))
        await until_computed(site, before["prefill-1"], tokens=1)
        site.kill("frontend-1")
        with pytest.raises(openai.APIError):
            await asking
        await until_free(site)
        after = await loads(site)
        computed = after["prefill-1"]["prefilled_tokens"] - before["prefill-1"]["prefilled_tokens"]
        _, usage = await site.tell(long, max_tokens=1)
        assert 0 < computed < usage.prompt_tokens, "nobody waited for the rest"
        assert after["prefill-1"]["generated_tokens"] == before["prefill-1"]["generated_tokens"]

        decode = site.deployment.pids()["decode-1"]
        for moment, prompt in shorter.items():
            before = await loads(site)
            if moment == "first token":
                os.kill(decode, signal.SIGSTOP)  # it fetches nothing while the frontend dies
            try:
                async with aclosing(site.stream(f"{prompt} Go on.", max_tokens=TOKENS)) as answer:
                    for _ in range(1 if moment == "first token" else 8):
                        await anext(answer)
                    if moment == "first token":
                        await until_held(site)
                    site.kill("frontend-1")
                    with pytest.raises(openai.APIError):
                        async for _ in answer:
                            pass
                if moment == "first token":
                    await until_free(site, ["prefill-1"])
            finally:
                os.kill(decode, signal.SIGCONT)
            await until_free(site)
            after = await loads(site)
            answered = after["decode-1"]["generated_tokens"] - before["decode-1"]["generated_tokens"]
            assert answered < TOKENS - 1, "nobody answered to the end"
            assert (await site.tell(prompt, max_tokens=24))[0] == whole[moment]
        await until_free(site)

    deploy(
        scenario,
        roles={"prefill": ROLE, "decode": ROLE},
        router=ALWAYS,
        worker={"kv_transfer": {"stream_kv": stream_kv, "pin_ttl_s": 600}},
        timeout_s=300,
    )
