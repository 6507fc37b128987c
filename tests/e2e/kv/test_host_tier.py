"""The host tier in real processes: histories that left the device come back, also while workers die."""

import asyncio
import random

import pytest

PROMPTS = 16
TEXTS = [f"{n} " + " ".join(f"river {n * 31 + word}" for word in range(60)) for n in range(PROMPTS)]
MOCK = {
    "engine": "mock",
    "kv_blocks": 96,
    "mock": {"kv_bytes_per_block": 256, "speedup": 20},
    "kv": {"host": "40x"},
}
PAGED = {
    "engine": "paged",
    "kv_blocks": 128,
    "weight_dtype": "float32",  # cached prefixes change the rounding
    "max_batch_tokens": 64,
    "kv": {"host": "64MiB"},
}


async def told(site, prompts):
    return [await site.tell(prompt, max_tokens=8) for prompt in prompts]


@pytest.mark.parametrize("role", [MOCK, PAGED], ids=["mock", "paged"])
def test_histories_that_left_the_device_are_loaded_from_the_host(deploy, role):
    async def scenario(site):
        first = await told(site, TEXTS)
        again = await told(site, TEXTS)
        assert [text for text, _ in again] == [text for text, _ in first]
        for _, usage in again:
            assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 17
        (name,) = await site.workers()
        load = await site.load(name)
        prompt_tokens = sum(usage.prompt_tokens for _, usage in again)
        assert load["onboarded_tokens"][0] > prompt_tokens / 2
        assert load["failed_steps"] == 0

    deploy(scenario, role=role)


@pytest.mark.slow
def test_streams_are_exact_while_workers_with_a_host_tier_die(deploy):
    async def scenario(site):
        expected = [text for text, _ in await told(site, TEXTS)]
        rng = random.Random(3)

        async def all_ready():
            return await site.ready_workers() == 2

        for _ in range(3):
            asked = asyncio.gather(*(site.tell(text, max_tokens=8) for text in TEXTS * 2))
            await asyncio.sleep(0.3)
            site.kill(rng.choice(list(await site.workers())))
            assert [text for text, _ in await asked] == expected * 2
            await site.until(all_ready)

    deploy(scenario, role=MOCK, workers=2, timeout_s=120)
