"""KV tiers in real processes: histories that left the device come back, also while workers die, and after a restart."""

import asyncio
import random

import pytest

PROMPTS = 16
TEXTS = [f"{n} " + " ".join(f"river {n * 31 + word}" for word in range(60)) for n in range(PROMPTS)]
MOCK = {
    "engine": "mock",
    "kv_blocks": 96,
    "mock": {
        "kv_bytes_per_block": 256,
        "timing": {"prefill_s_per_token": 5e-4},  # slower than any copy
    },
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


BY_LRU = {**MOCK, "kv": {**MOCK["kv"], "eviction": "lru"}}
BLOCK = 16


@pytest.mark.parametrize(
    "role",
    [
        pytest.param(BY_LRU, id="mock-lru"),
        pytest.param(PAGED, id="paged", marks=pytest.mark.nightly),
    ],
)
def test_histories_that_left_the_device_are_loaded_from_the_host(deploy, role):
    async def scenario(site):
        (said,) = [line for line in site.said if " kv tier " in line]
        assert "host: loading pays above" in said
        assert "a probe measured" in said
        first = await told(site, TEXTS)
        again = await told(site, TEXTS)
        assert [text for text, _ in again] == [text for text, _ in first]
        cached = sum(usage.prompt_tokens_details.cached_tokens for _, usage in again)
        assert cached >= 0.8 * sum(usage.prompt_tokens for _, usage in again)
        (name,) = await site.workers()
        load = await site.load(name)
        loaded, room = load["onboarded_tokens"][0], load["total_blocks"] * BLOCK
        assert loaded >= cached - room, "what the device has no room for comes from the host"
        if role["kv"].get("eviction") == "lru":
            # Prompts in turns leave nothing to hit on a device by lru; `seconds` keeps some of them, up to its room.
            assert loaded >= 0.95 * cached
        assert load["failed_steps"] == 0
        (tier,) = load["kv_tiers"]
        assert tier["hit_tokens"] == load["onboarded_tokens"][0]
        assert tier["saved_s"] > 0
        labels = f'{{tier="host",worker="{name}"}}'

        async def is_told():
            (tier,) = (await site.load(name))["kv_tiers"]
            async with site.http.get(f"{site.url}/metrics") as response:
                metrics = await response.text()
            return (
                tier["cached_blocks"] == tier["offloaded_blocks"]
                and f"penstock_router_kv_tier_cached_blocks{labels} {float(tier['cached_blocks'])}" in metrics
            )

        await site.until(is_told)  # also what was copied after the last request

    deploy(scenario, role=role)


@pytest.mark.slow
def test_streams_are_exact_while_workers_with_a_host_tier_die(deploy):
    async def scenario(site):
        expected = [text for text, _ in await told(site, TEXTS)]
        rng = random.Random(3)

        async def all_ready():
            pids = {worker["pid"] for worker in (await site.workers()).values()}
            return killed not in pids and await site.ready_workers() == 2

        for _ in range(2):
            asked = asyncio.gather(*(site.tell(text, max_tokens=8) for text in TEXTS * 2))
            await asyncio.sleep(0.3)
            victim = rng.choice(list(await site.workers()))
            killed = site.deployment.pids()[victim]
            site.kill(victim)
            assert [text for text, _ in await asked] == expected * 2
            await site.until(all_ready)

    deploy(scenario, role=MOCK, workers=2, timeout_s=120)


def test_a_disk_brings_histories_back_after_everything_was_restarted(deploy, tmp_path):
    role = {**MOCK, "kv": {"disk": f"{tmp_path}/kv/slots:40x"}}
    first = []

    async def before(site):
        first.extend(text for text, _ in await told(site, TEXTS))
        assert [text for text, _ in await told(site, TEXTS)] == first
        (name,) = await site.workers()
        site.kill(name)

    async def after(site):
        again = await told(site, TEXTS)
        assert [text for text, _ in again] == first
        (name,) = await site.workers()
        load = await site.load(name)
        assert load["onboarded_tokens"][1] > sum(usage.prompt_tokens for _, usage in again) / 2
        assert load["failed_steps"] == 0
        assert [tier["corrupt_blocks"] for tier in load["kv_tiers"]] == [0]

    deploy(before, role=role)
    deploy(after, role=role)


@pytest.mark.parametrize("size", ["40x", pytest.param("1MiB", marks=pytest.mark.nightly)])
def test_workers_of_a_host_load_what_a_killed_one_has_kept_and_it_finds_it_again(deploy, size):
    async def scenario(site):
        first = [text for text, _ in await told(site, TEXTS)]
        kept = {name: (await site.load(name))["kv_tiers"][0] for name in await site.workers()}
        assert all(tier["cached_blocks"] for tier in kept.values()), "both have computed some"
        victim, other = sorted(kept)
        site.kill(victim)
        again = await told(site, TEXTS)
        assert [text for text, _ in again] == first
        cached = sum(usage.prompt_tokens_details.cached_tokens for _, usage in again)
        assert cached >= 0.8 * sum(usage.prompt_tokens for _, usage in again)
        hits = (await site.load(other))["kv_tiers"][0]["hit_tokens"]
        assert hits > 16 * 0.8 * kept[victim]["cached_blocks"]

        async def is_back():
            return await site.ready_workers() == 2

        await site.until(is_back)
        (tier,) = (await site.load(victim))["kv_tiers"]
        assert tier["cached_blocks"] >= 0.8 * kept[victim]["cached_blocks"]
        for name in (victim, other):
            load = await site.load(name)
            assert (load["failed_steps"], load["kv_tiers"][0]["corrupt_blocks"]) == (0, 0)

    deploy(scenario, role={**MOCK, "kv": {"host": size}}, workers=2)
