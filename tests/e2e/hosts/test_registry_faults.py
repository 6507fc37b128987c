"""A real registry is killed, emptied and stopped under streams: no token is wrong, none is lost, workers are registered again.

The NATS carries KV events, too: the index is whole again.
"""

import asyncio

import aiohttp
import pytest

from penstock.deploy.secret import SECRET_VARIABLE
from tests.support.faulty_registry import (
    PROMPT,
    TOKENS,
    ready_ids,
    registry_is_connected,
    registry_is_lost,
    streams,
)
from tests.support.registries import Etcd, Nats

pytestmark = [pytest.mark.slow, pytest.mark.needs("etcd", "nats-server")]
LEASE_S = 1.0


async def index_is_whole(site):
    """Whether the frontend's index has what its workers say that they cache."""
    workers = (await site.workers()).values()
    return all(
        worker["load"] and worker["indexed_blocks"] == worker["load"]["cached_blocks"] for worker in workers
    )


@pytest.mark.parametrize(("discovery", "make"), [("etcd", Etcd), ("nats", Nats)], ids=["etcd", "nats"])
def test_streams_and_new_requests_go_on_without_the_registry(deploy, monkeypatch, discovery, make):
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of the test")
    server = make()

    async def scenario(site):
        undisturbed, _ = await site.tell(PROMPT, max_tokens=TOKENS)
        few, _ = await site.tell(PROMPT, max_tokens=5)
        before = await ready_ids(site)
        assert len(before) == 2
        for fault in ("killed", "emptied", "stopped"):
            await site.until(lambda: registry_is_connected(site))
            async with streams(site, undisturbed):
                if fault == "stopped":
                    server.pause()
                else:
                    server.kill()
                try:
                    await site.until(lambda: registry_is_lost(site))
                    await asyncio.sleep(
                        3 * LEASE_S
                    )  # leases expire as soon as a registry is there that can expire them
                    assert (await site.tell(PROMPT, max_tokens=5))[0] == few
                    if fault == "emptied":
                        server.forget()
                finally:
                    if fault == "stopped":
                        server.resume()
                    else:
                        await asyncio.to_thread(server.start)
                await site.until(lambda: registry_is_connected(site))
                await asyncio.sleep(3 * LEASE_S)
            assert await ready_ids(site) == before, f"{fault}: nobody was removed or started again"
            await site.until(lambda: index_is_whole(site))
        site.kill("worker-1")

        async def replaced():
            return len(now := await ready_ids(site)) == 2 and now != before

        await site.until(replaced)
        assert (await site.tell(PROMPT, max_tokens=5))[0] == few

    async def main():
        async with server:
            runtime = {"discovery": discovery, "urls": [server.url], "registry": {"lease_ttl_s": LEASE_S}}
            runtime |= {"events": "nats"} if discovery == "nats" else {}
            role = {"mock": {"speedup": 0.5}}
            run = lambda: deploy(scenario, workers=2, role=role, runtime=runtime, timeout_s=200.0)  # noqa: E731
            await asyncio.to_thread(run)

    asyncio.run(main())


async def everything_is_back(site, workers):
    """Wait until the registry answers, nobody was removed or started again, and the index is whole."""
    await site.until(lambda: registry_is_connected(site))
    await asyncio.sleep(3 * LEASE_S)

    async def same():
        return await ready_ids(site) == workers

    await site.until(same)
    await site.until(lambda: index_is_whole(site))


def both_registries(deploy, monkeypatch, scenario):
    """Run a deployment of two workers with discovery by etcd and events by NATS."""
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of the test")
    etcd, nats = Etcd(), Nats()

    async def main():
        async with etcd, nats:
            runtime = {
                "discovery": "etcd", "urls": [etcd.url], "events": "nats", "event_urls": [nats.url],
                "registry": {"lease_ttl_s": LEASE_S},
            }  # fmt: skip
            role = {"mock": {"speedup": 0.5}}
            run = lambda: deploy(  # noqa: E731
                lambda site: scenario(site, etcd, nats),
                workers=2,
                role=role,
                runtime=runtime,
                timeout_s=240.0,
            )
            await asyncio.to_thread(run)

    asyncio.run(main())


def test_streams_go_on_while_etcd_and_nats_fail_at_once(deploy, monkeypatch):
    async def scenario(site, etcd, nats):
        undisturbed, _ = await site.tell(PROMPT, max_tokens=TOKENS)
        few, _ = await site.tell(PROMPT, max_tokens=5)
        before = await ready_ids(site)
        for fault in ("stopped", "emptied"):
            await site.until(lambda: registry_is_connected(site))
            async with streams(site, undisturbed):
                for server in (etcd, nats):
                    if fault == "stopped":
                        server.pause()
                    else:
                        server.kill()
                try:
                    await site.until(lambda: registry_is_lost(site))
                    await asyncio.sleep(3 * LEASE_S)
                    assert (await site.tell(PROMPT, max_tokens=5))[0] == few
                finally:
                    for server in (etcd, nats):
                        if fault == "stopped":
                            server.resume()
                        else:
                            server.forget()
                            await asyncio.to_thread(server.start)
                await everything_is_back(site, before)
        assert (await site.tell(PROMPT, max_tokens=5))[0] == few

    both_registries(deploy, monkeypatch, scenario)


def test_a_frontend_and_its_registries_are_killed_at_once(deploy, monkeypatch):
    """The next frontend waits for them, and then has all workers; these were never started again."""

    async def scenario(site, etcd, nats):
        few, _ = await site.tell(PROMPT, max_tokens=5)
        before = await ready_ids(site)
        for server in (etcd, nats):
            server.kill()
        site.kill("frontend-1")
        await asyncio.sleep(3 * LEASE_S)
        for server in (etcd, nats):
            server.forget()
            await asyncio.to_thread(server.start)

        async def answers():
            try:
                return await ready_ids(site) == before
            except (aiohttp.ClientError, KeyError):
                return False

        await site.until(answers, timeout_s=90.0)
        assert (await site.tell(PROMPT, max_tokens=5))[0] == few
        await everything_is_back(site, before)

    both_registries(deploy, monkeypatch, scenario)
