"""Prefixes loaded while their requests wait, in real processes: also while clients leave, and a worker is killed."""

import asyncio

import pytest

TEXTS = [f"{n} " + " ".join(f"lake {n * 31 + word}" for word in range(60)) for n in range(12)]
MOCK = {
    "engine": "mock",
    "kv_blocks": 96,
    "mock": {"kv_bytes_per_block": 256, "timing": {"prefill_s_per_token": 5e-4}},
    "max_running_requests": 1,
}
PAGED = {
    "engine": "paged",
    "kv_blocks": 128,
    "weight_dtype": "float32",  # cached prefixes change the rounding
    "max_batch_tokens": 64,
    "max_running_requests": 1,
}


async def told(site):
    """Ask all at once; one runs, and others wait at the worker."""
    return await asyncio.gather(*(site.tell(text, max_tokens=8) for text in TEXTS))


@pytest.mark.parametrize(
    ("role", "prefetch"),
    [
        pytest.param(MOCK, 16, id="mock"),
        pytest.param(MOCK, 0, id="mock-none", marks=pytest.mark.nightly),
        pytest.param(PAGED, 16, id="paged", marks=pytest.mark.nightly),
    ],
)
def test_waiting_requests_load_their_prefixes_before_their_turn(deploy, role, prefetch):
    async def scenario(site):
        first = await told(site)
        again = await told(site)
        assert [text for text, _ in again] == [text for text, _ in first]
        cached = sum(usage.prompt_tokens_details.cached_tokens for _, usage in again)
        assert cached >= 0.8 * sum(usage.prompt_tokens for _, usage in again)
        (name,) = await site.workers()
        load = await site.load(name)
        (tier,) = load["kv_tiers"]
        assert bool(tier["prefetched_blocks"]) == bool(prefetch)
        assert tier["wasted_blocks"] == 0
        assert load["failed_steps"] == 0

    deploy(scenario, role=role | {"kv": {"host": "64MiB", "prefetch": prefetch}})
