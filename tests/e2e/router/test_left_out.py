"""Workers that get nothing new, over real processes: past a busy threshold, and told to stop."""

import asyncio
import os
import signal

import pytest

pytestmark = pytest.mark.slow

MODEL = "penstock-demo"
LONG = "Tell me about rivers. " * 40
TALK = [{"role": "user", "content": LONG}]
WHY = {"X-Penstock-Explain": "1"}
TOKENS = 600
BUSY_BLOCKS = 12
"""0.003 of 4,096; the prompt has more."""


async def decide(site):
    """Ask for a token of the same prompt; give where it went and who was left out."""
    answer = await site.client.chat.completions.create(
        model=MODEL, messages=TALK, max_tokens=1, extra_headers=WHY
    )
    (decision,) = answer.model_extra["penstock"]["decisions"]
    return decision["worker"], {left["worker"]: left["why"] for left in decision["left_out"]}


async def begin(site):
    """Start a long stream; give the task that reads it and the worker that it is on."""
    begun = asyncio.Event()

    async def read():
        text, finish = "", None
        async for chunk in site.stream(LONG, max_tokens=TOKENS):
            begun.set()
            text += site.text_of(chunk)
            finish = next((choice.finish_reason for choice in chunk.choices), None) or finish
        return text, finish

    reading = asyncio.ensure_future(read())
    await begun.wait()
    (busy,) = (name for name, worker in (await site.workers()).items() if worker["open_requests"])
    return reading, busy


def test_a_worker_past_its_threshold_gets_nothing_new_though_it_holds_the_prefix(deploy):
    async def scenario(site):
        reading, busy = await begin(site)

        async def is_told():
            return (await site.load(busy)).get("active_blocks", 0) > BUSY_BLOCKS

        await site.until(is_told)
        worker, left_out = await decide(site)
        assert (worker != busy, left_out) == (True, {busy: "busy"})
        assert (await reading)[1] == "length"

        async def is_calm():
            return (await decide(site))[1] == {}

        await site.until(is_calm, timeout_s=5)

    deploy(scenario, workers=2, router={"busy_kv_share": 0.003}, frontend={"port": 0, "explains": True})


def test_a_worker_told_to_stop_gets_nothing_new_and_ends_its_streams_itself(deploy):
    async def scenario(site):
        whole, _ = await site.tell(LONG, max_tokens=TOKENS)
        reading, busy = await begin(site)
        os.kill(site.deployment.pids()[busy], signal.SIGTERM)

        async def drains():
            return (await site.workers())[busy]["condition"] == "draining"

        await site.until(drains, timeout_s=2)
        worker, left_out = await decide(site)
        assert (worker != busy, left_out) == (True, {busy: "draining"})
        assert not reading.done()
        assert await reading == (whole, "length")

        async def is_back():
            return await site.ready_workers() == 2

        await site.until(is_back)

    deploy(scenario, workers=2, frontend={"port": 0, "explains": True})
