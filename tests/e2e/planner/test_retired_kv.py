"""A worker that is taken away leaves its KV in the host tier: its conversations go on at another one without computing them again."""

import asyncio

import pytest

pytestmark = pytest.mark.slow

TURNS = 4
HISTORIES = [f"{n} " + " ".join(f"river {n * 31 + word}" for word in range(60)) for n in range(TURNS)]
PAGED = {
    "engine": "paged",
    "kv_blocks": 512,  # the device holds all: nothing leaves it for want of room
    "weight_dtype": "float32",  # cached prefixes change the rounding of smaller types
    "max_batch_tokens": 64,
    "replicas_max": 2,
    "kv": {"host": "64MiB"},
}


async def told(site, *, max_tokens=8):
    return [await site.tell(text, max_tokens=max_tokens) for text in HISTORIES]


def test_conversations_of_a_retired_worker_are_loaded_by_another_one(deploy):
    async def scenario(site):
        pool = site.deployment.pool
        first = await told(site)
        kept = {name: (await site.load(name))["kv_tiers"][0] for name in await site.workers()}
        assert len(kept) == 2
        assert all(tier["cached_blocks"] for tier in kept.values()), "both have computed some"
        running = [asyncio.create_task(site.tell(text, max_tokens=64)) for text in HISTORIES]
        leaving, staying = sorted(kept)

        async def is_busy():
            return (await site.load(leaving)).get("running_requests", 0) > 0

        await site.until(is_busy)
        await pool.retire([leaving], by="planner")
        long_texts = [text for text, _ in await asyncio.gather(*running)]
        while len((await pool.scale()).replicas) > 1:
            await pool.scale((await pool.scale()).sequence)
        again = await told(site)
        assert [text for text, _ in again] == [text for text, _ in first]
        prompts = sum(usage.prompt_tokens for _, usage in again)
        assert sum(usage.prompt_tokens_details.cached_tokens for _, usage in again) >= 0.8 * prompts
        load = await site.load(staying)
        assert load["onboarded_tokens"][0] > 0, "some came by the host tier"
        assert load["failed_steps"] == 0
        assert [text for text, _ in await told(site, max_tokens=64)] == long_texts

    deploy(
        scenario,
        role=PAGED,
        workers=2,
        router={"policy": "round-robin"},
        worker={"drain_timeout_s": 0.2},
        timeout_s=90,
    )
