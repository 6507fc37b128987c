"""KV of other workers in real processes: a session that moves loads its beginning from the worker that had it, while that lives."""

import asyncio

import pytest

TEXTS = [f"{n} " + " ".join(f"river {n * 31 + word}" for word in range(150)) for n in range(7)]
MOCK = {
    "engine": "mock",
    "kv_blocks": 512,
    "mock": {
        "kv_bytes_per_block": 4096,
        "timing": {"prefill_s_per_token": 2e-3},
    },  # 0.4 s a prompt: slower than any copy
}
PAGED = {"engine": "paged", "kv_blocks": 512, "weight_dtype": "float32", "max_batch_tokens": 64}
IN_TURN = {
    "router": {"policy": "round-robin", "disagg": {"link_bytes_per_s": 1e9}},
    "worker": {"kv_transfer": {"peers": True}},
}


async def peer_counts(site):
    loads = [await site.load(name) for name in sorted(await site.workers())]
    return [(load["peer_tokens"], load["peer_failures"]) for load in loads]


async def told(site, texts):
    return [await site.tell(text, max_tokens=8) for text in texts]


async def moved(site, share, rounds=6):
    """Tell texts twice, the second time to the other worker, until more than a share of them was cached then; returns the cached tokens.

    On a busy machine some loads are later than computing would be, and are given up.
    """
    for number in range(rounds):
        texts = [f"{number} {text}" for text in TEXTS]  # an odd number of them
        first = await told(site, texts)
        held = [worker["indexed_blocks"] for worker in (await site.workers()).values()]
        await asyncio.sleep(1.0)  # routers learn what workers hold
        again = await told(site, texts)
        assert [text for text, _ in again] == [text for text, _ in first]
        prompt_tokens = sum(usage.prompt_tokens for _, usage in again)
        cached = sum(usage.prompt_tokens_details.cached_tokens for _, usage in again)
        print(number, held, prompt_tokens, cached, await peer_counts(site))
        if cached > share * prompt_tokens:
            return cached
    raise AssertionError(f"{cached} of {prompt_tokens} tokens were cached")


@pytest.mark.parametrize(
    "role", [pytest.param(MOCK, id="mock"), pytest.param(PAGED, id="paged", marks=pytest.mark.nightly)]
)
def test_sessions_that_move_load_their_prefix_from_the_other_worker(deploy, role):
    async def scenario(site):
        cached = await moved(site, 0.5)

        async def is_told():
            counts = await peer_counts(site)
            return sum(tokens for tokens, _ in counts) >= cached

        await site.until(is_told)
        for name in await site.workers():
            load = await site.load(name)
            assert (load["failed_steps"], load["kv_corrupt"]) == (0, 0)

        async def nothing_is_held():
            return not any([(await site.load(name))["active_blocks"] for name in await site.workers()])

        await site.until(nothing_is_held)

    deploy(scenario, role=role, workers=2, timeout_s=180, **IN_TURN)
