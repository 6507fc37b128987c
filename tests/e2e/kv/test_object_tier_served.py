"""The object tier in real processes: what one worker stored another loads, also after a restart, and whatever the store does."""

from collections.abc import Iterator
from functools import partial

import pytest
from s3_server import S3Server, proxy_before

TEXTS = [f"{n} " + " ".join(f"meadow {n * 31 + word}" for word in range(60)) for n in range(16)]
MOCK = {
    "engine": "mock",
    "kv_blocks": 96,
    "mock": {"kv_bytes_per_block": 256, "timing": {"prefill_s_per_token": 2e-3}},
}
"""Computing is slower than any load, and the device has room for a fraction of the prompts."""
PAGED = {"engine": "paged", "kv_blocks": 128, "weight_dtype": "float32", "max_batch_tokens": 64}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def with_store(role, url, endpoint=None, **fields):
    options = {"endpoint": endpoint} if endpoint else {}
    return {**role, "kv": {"object": {"url": url, "refresh_s": 0.2, "options": options, **fields}}}


async def told(site, texts=TEXTS):
    return [await site.tell(text, max_tokens=4) for text in texts]


async def tiers(site):
    """Give the object tier's counts by worker; a worker that has not said anything is left out."""
    loads = {name: await site.load(name) for name in await site.workers()}
    return {name: load["kv_tiers"][0] for name, load in loads.items() if load.get("kv_tiers")}


async def all_know(site, least=1):
    """Wait until all workers know the same blocks."""

    async def holds():
        counts = [tier["cached_blocks"] for tier in (await tiers(site)).values()]
        return len(counts) == len(await site.workers()) and min(counts) == max(counts) >= least

    await site.until(holds)


@pytest.mark.parametrize(
    "role", [pytest.param(MOCK, id="mock"), pytest.param(PAGED, id="paged", marks=pytest.mark.nightly)]
)
def test_a_worker_loads_what_another_stored_and_a_restarted_one_too(deploy, tmp_path, role):
    role = with_store(role, f"file://{tmp_path}/fleet")
    first = []

    async def before(site):
        first.extend(text for text, _ in await told(site))
        await all_know(site, least=100)
        await told(site, ["one more, so that each prompt goes to the other worker"])
        again = await told(site)
        assert [text for text, _ in again] == first
        for tier in (await tiers(site)).values():
            assert tier["hit_tokens"] > 0, "each worker loads what the other one stored"
            assert tier["saved_s"] > 0
            assert tier["corrupt_blocks"] == 0
        victim = next(iter(await site.workers()))
        site.kill(victim)

    async def after(site):
        await all_know(site, least=100)
        again = await told(site)
        assert [text for text, _ in again] == first
        cached = sum(usage.prompt_tokens_details.cached_tokens for _, usage in again)
        assert cached > 0.5 * sum(usage.prompt_tokens for _, usage in again)

    deploy(before, role=role, workers=2, router={"policy": "round-robin"})
    deploy(after, role=role, workers=2, router={"policy": "round-robin"})


@pytest.mark.slow
@pytest.mark.usefixtures("credentials")
def test_requests_go_on_while_the_store_fails_refuses_and_hangs(deploy, s3, capfd):
    async def is_off(site):
        (tier,) = (await tiers(site)).values()
        return tier["is_off"]

    with proxy_before(s3) as proxy:

        async def scenario(site):
            first = [text for text, _ in await told(site)]
            await all_know(site, least=100)
            number = 0

            async def ask(*, until_off):
                """Ask for what is stored, and for new prompts, which are stored."""
                nonlocal number
                texts = [*TEXTS[:4], f"{number} " + " ".join(f"brook {number + word}" for word in range(60))]
                number += 1000
                assert [text for text, _ in await told(site, texts)][:4] == first[:4]
                return await is_off(site) is until_off

            for fault, value in (("status", 500), ("hang", True)):
                setattr(proxy, fault, value)
                await site.until(partial(ask, until_off=True))
                setattr(proxy, fault, type(value)())
                await site.until(partial(ask, until_off=False))
            assert [text for text, _ in await told(site)] == first
            (tier,) = (await tiers(site)).values()
            assert tier["corrupt_blocks"] == 0

        deploy(scenario, role=with_store(MOCK, "s3://bucket/faults", proxy.url), timeout_s=240)
    text = "".join(capfd.readouterr())
    assert text.count("kv_tier_off") == 2
    assert "secret-of-the-test" not in text


@pytest.mark.usefixtures("credentials")
def test_a_store_that_is_not_there_is_warned_of_once_and_serving_begins(deploy, monkeypatch, capfd):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    role = with_store(MOCK, "s3://bucket/fleet")

    async def scenario(site):
        assert all(text for text, _ in await told(site, TEXTS[:3]))
        (tier,) = (await tiers(site)).values()
        assert tier["is_off"] is True

    deploy(scenario, role=role)
    text = "".join(capfd.readouterr())
    assert text.count("kv_tier_off") == 1
    assert "listing s3://bucket/fleet" in text
    assert "127.0.0.1:9" in text
