"""A decode worker with a host tier, real processes: it loads what it has of a prompt, and reads only the rest."""

import pytest

pytestmark = pytest.mark.slow

TOKENS = 16
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}
ROLE = {"engine": "paged", "weight_dtype": "float32", "replicas": 1, "max_batch_tokens": 128}


def prompt(number):
    return f"{number}: Which parts does a request pass on its way, and what does each of them do? " * 8


async def transfer(site):
    load = await site.load("decode-1")
    (host,) = load["kv_tiers"]
    moved = sum(read["num_bytes"] for read in load.get("kv_reads", ()))
    return moved, host["loaded_blocks"], load.get("kv_failures", 0)


def test_a_prompt_that_left_the_device_comes_from_the_decode_workers_host(deploy):
    async def scenario(site):
        first = (await site.tell(prompt(0), max_tokens=TOKENS))[0]
        for number in range(1, 5):
            await site.tell(prompt(number), max_tokens=TOKENS)
        moved, loaded, failures = await transfer(site)
        assert moved > 0
        assert (loaded, failures) == (0, 0)
        assert (await site.tell(prompt(0), max_tokens=TOKENS))[0] == first
        again, loaded, failures = await transfer(site)
        assert loaded >= 10, "most of the prompt"
        assert again - moved < moved / 5 / 4, "the prefill worker sends next to nothing of it"
        assert failures == 0
        assert (await site.load("decode-1"))["kv_corrupt"] == 0

        async def nothing_is_held():
            return (await site.load("decode-1"))["active_blocks"] == 0

        await site.until(nothing_is_held)

    decode = ROLE | {"kv_blocks": 40, "kv": {"host": "64MiB"}}
    deploy(
        scenario, roles={"prefill": ROLE | {"kv_blocks": 40}, "decode": decode}, router=ALWAYS, timeout_s=120
    )
