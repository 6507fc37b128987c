"""Packs on a real S3 server over HTTP, which fails, refuses, hangs and dies: the tier turns off once and returns by itself."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import obstore
import pytest
from s3_server import Proxy, S3Server, proxy_of

from penstock.core.errors import TransferError
from penstock.kv.breaker import CircuitBreaker
from penstock.kv.guarded import GuardedStore
from penstock.kv.object.config import PacksConfig
from penstock.kv.object.packs import ObjectPacks
from penstock.testing.loop import run_async
from tests.support.slots import NAMESPACE, chain, content, targets

pytestmark = pytest.mark.slow

BLOCK_BYTES = 64 << 10
HASHES = chain(24)
BLOCKS = content(HASHES, BLOCK_BYTES)
MIB = 1 << 20


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


def options(url: str) -> dict[str, str]:
    return {
        "endpoint": url,
        "region": "us-east-1",
        "access_key_id": "any",
        "secret_access_key": "secret-of-the-test",
    }


def make(url: str, prefix: str, bucket: str = "bucket", **config) -> ObjectPacks:
    settings = {"pack_bytes": MIB, "gather_s": 0.01, "request_timeout_s": 5.0, "retries": 0} | config
    return ObjectPacks(
        f"s3://{bucket}/sub",
        BLOCK_BYTES,
        NAMESPACE,
        PacksConfig(**settings),
        prefix=prefix,
        options=options(url),
    )


async def check_loads(packs: "ObjectPacks | GuardedStore", count: int = len(HASHES)) -> None:
    into = targets(len(HASHES), BLOCK_BYTES)
    assert await packs.load(HASHES, into) == count
    assert (into[:count] == BLOCKS[:count]).all()


def raw_store(url: str):
    return obstore.store.from_url("s3://bucket/sub", config=options(url), client_options={"allow_http": True})


async def test_two_writers_share_packs_and_collect_them(s3: S3Server) -> None:
    async with make(s3.url, "two") as one, make(s3.url, "two", budget_bytes=MIB) as two:
        held = await asyncio.gather(one.store(HASHES, BLOCKS), two.store(HASHES, BLOCKS))
        assert held == [24, 24]
        keys = [row["path"] for row in obstore.list(raw_store(s3.url), prefix="two").collect()]
        assert len(keys) == 2, "the second of two equal packs was not created"
        for packs in (one, two):
            await packs.refresh()
            await check_loads(packs)
        async with make(s3.url, "two") as three:
            await three.refresh()
            await check_loads(three)
        assert await two.collect() >= 1
        await one.refresh()
        assert one.locate(HASHES) < 24
        await check_loads(one, one.locate(HASHES))
        assert one.counts.mismatched == one.counts.packs_gone == 0


@asynccontextmanager
async def guarded(s3: S3Server, prefix: str) -> AsyncIterator[tuple[Proxy, ObjectPacks, GuardedStore]]:
    breaker = CircuitBreaker("object", failures_max=2, pause_s=0.05, pause_max_s=0.2)
    async with proxy_of(s3) as proxy, make(proxy.url, prefix, refresh_s=0.1, request_timeout_s=2.0) as packs:
        tier = GuardedStore(packs, breaker, timeout_s=10.0)
        assert await tier.store(HASHES[:20], BLOCKS[:20]) == 20
        yield proxy, packs, tier


async def suffer(tier: GuardedStore) -> None:
    """Use it until it is off; nothing is raised and nothing is loaded."""
    while tier.breaker.is_on:
        assert await tier.load(HASHES, targets(24, BLOCK_BYTES)) == 0
        assert await tier.store(HASHES, BLOCKS) == 0
    assert (tier.locate(HASHES), await tier.load(HASHES, targets(24, BLOCK_BYTES))) == (0, 0)


async def return_by_itself(tier: GuardedStore) -> None:
    async with asyncio.timeout(60):
        while not tier.breaker.is_on:
            await tier.load(HASHES, targets(24, BLOCK_BYTES))
            await tier.store(HASHES, BLOCKS)  # a load asks nothing of a bucket that was listed and is empty
            await asyncio.sleep(0.02)
        while await tier.store(HASHES, BLOCKS) < 24:  # noqa: ASYNC110 - what hung is given up first
            await asyncio.sleep(0.02)
    await check_loads(tier)


def logged(capsys: pytest.CaptureFixture[str]) -> tuple[int, int, int]:
    text = "".join(capsys.readouterr())
    assert "secret-of-the-test" not in text
    return text.count("kv_tier_off"), text.count("kv_tier_on"), text.count("[warning")


@pytest.mark.parametrize(
    "status", [500, *(pytest.param(status, marks=pytest.mark.nightly) for status in (403, 404))]
)
async def test_answers_with_errors_turn_it_off_once(s3: S3Server, capsys, status: int) -> None:
    async with guarded(s3, f"status{status}") as (proxy, packs, tier):
        proxy.status = status
        if status != 404:  # a pack that is not there is a miss, a put that finds no bucket an error
            with pytest.raises(TransferError, match="s3://bucket/sub/status"):
                await packs.load(HASHES, targets(24, BLOCK_BYTES))
        await suffer(tier)
        proxy.status = 0
        await return_by_itself(tier)
        assert packs.counts.mismatched == 0
    assert logged(capsys) == (1, 1, 1)


async def test_a_server_that_hangs_turns_it_off_once(s3: S3Server, capsys) -> None:
    async with guarded(s3, "hang") as (proxy, packs, tier):
        proxy.hang = True
        await suffer(GuardedStore(packs, tier.breaker, timeout_s=0.2))
        proxy.hang = False
        await return_by_itself(tier)
    assert logged(capsys) == (1, 1, 1)


def test_a_server_that_dies_and_comes_back_empty_turns_it_off_once(capsys) -> None:
    server = S3Server()

    async def main() -> None:
        async with guarded(server, "dies") as (_proxy, packs, tier):
            await asyncio.to_thread(server.kill)
            await suffer(tier)
            await asyncio.to_thread(server.start)
            await return_by_itself(tier)
            assert packs.counts.mismatched == 0

    try:
        run_async(main(), timeout_s=60)
    finally:
        server.kill()
    assert logged(capsys) == (1, 1, 1)
