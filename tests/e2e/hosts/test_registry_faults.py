"""A real registry is killed, emptied and stopped under streams: no token is wrong, none is lost, workers are registered again.

A NATS carries KV events, too: the index is whole again.
"""

import asyncio

import aiohttp
import pytest

from penstock.deploy.identity import SECRET_VARIABLE
from tests.support.faulty_registry import (
    PROMPT,
    TOKENS,
    ready_ids,
    registry_is_connected,
    registry_is_lost,
    streams,
)
from tests.support.kubernetes.thread import write_config
from tests.support.registries import ApiServer, Etcd, Nats

pytestmark = [pytest.mark.slow, pytest.mark.needs("etcd", "nats-server")]
LEASE_S = 3.0
"""A worker that gets no CPU for so long is rightly gone."""


class Registries:
    """Servers that fail together."""

    def __init__(self, *servers):
        self.servers = servers

    async def fail(self, fault):
        for server in self.servers:
            if fault == "stopped":
                server.pause()
            else:
                server.kill()

    async def mend(self, fault):
        for server in self.servers:
            if fault == "stopped":
                server.resume()
                continue
            if fault == "emptied":
                server.forget()
            await asyncio.to_thread(server.start)


@pytest.fixture
def deployed(deploy, monkeypatch, tmp_path):
    """Give a function that runs a scenario with two workers and these servers."""

    def run(scenario, *servers, **runtime):
        monkeypatch.setenv(SECRET_VARIABLE, "a secret of the test")
        try:
            for server in servers:
                server.start()
            if runtime["discovery"] == "kubernetes":
                monkeypatch.setenv("KUBECONFIG", str(write_config(servers[0].url, tmp_path / "config")))
            else:
                runtime["urls"] = [servers[0].url]
            deploy(
                lambda site: scenario(site, Registries(*servers)),
                workers=2,
                role={"mock": {"speedup": 0.5}},
                runtime=runtime | {"registry": {"lease_ttl_s": LEASE_S}},
                timeout_s=240.0,
            )
        finally:
            for server in servers:
                server.close()

    return run


async def everything_is_back(site, workers):
    """Wait until the registry answers and the index is whole, and see that nobody was removed or started again."""

    async def index_is_whole():
        seen = (await site.workers()).values()
        return all(each["load"] and each["indexed_blocks"] == each["load"]["cached_blocks"] for each in seen)

    await site.until(lambda: registry_is_connected(site))
    await asyncio.sleep(2 * LEASE_S)
    assert await ready_ids(site) == workers
    await site.until(index_is_whole)


async def fail_under_streams(site, registries, faults):
    undisturbed, _ = await site.tell(PROMPT, max_tokens=TOKENS)
    few, _ = await site.tell(PROMPT, max_tokens=5)
    before = await ready_ids(site)
    assert len(before) == 2
    for fault in faults:
        await site.until(lambda: registry_is_connected(site))
        async with streams(site, undisturbed):
            await registries.fail(fault)
            try:
                await site.until(lambda: registry_is_lost(site))
                await asyncio.sleep(2 * LEASE_S)  # leases expire as soon as somebody is there to expire them
                assert (await site.tell(PROMPT, max_tokens=5))[0] == few
            finally:
                await registries.mend(fault)
            await everything_is_back(site, before)
    site.kill("worker-1")

    async def replaced():
        return len(now := await ready_ids(site)) == 2 and now != before

    await site.until(replaced)
    assert (await site.tell(PROMPT, max_tokens=5))[0] == few


@pytest.mark.parametrize(
    ("discovery", "make", "faults"),
    [
        ("etcd", Etcd, ("killed", "emptied", "stopped")),
        pytest.param("nats", Nats, ("killed", "emptied", "stopped"), marks=pytest.mark.nightly),
        pytest.param("kubernetes", ApiServer, ("emptied", "stopped"), marks=pytest.mark.nightly),
    ],
    ids=["etcd", "nats", "kubernetes"],
)
def test_streams_and_new_requests_go_on_without_the_registry(deployed, discovery, make, faults):
    events = {"events": "nats"} if discovery == "nats" else {}
    deployed(
        lambda site, registries: fail_under_streams(site, registries, faults),
        make(),
        discovery=discovery,
        **events,
    )


@pytest.mark.nightly
def test_streams_go_on_while_etcd_and_nats_fail_at_once(deployed):
    nats = Nats()
    deployed(
        lambda site, registries: fail_under_streams(site, registries, ("stopped", "emptied")),
        Etcd(),
        nats,
        discovery="etcd",
        events="nats",
        event_urls=[nats.url],
    )


def test_a_frontend_and_its_registries_are_killed_at_once(deployed):
    """The next frontend waits for them, and then has all workers; these were never started again."""

    async def scenario(site, registries):
        few, _ = await site.tell(PROMPT, max_tokens=5)
        before = await ready_ids(site)
        await registries.fail("emptied")
        site.kill("frontend-1")
        await asyncio.sleep(2 * LEASE_S)
        await registries.mend("emptied")

        async def answers():
            try:
                return await ready_ids(site) == before
            except (aiohttp.ClientError, KeyError):
                return False

        await site.until(answers, timeout_s=90.0)
        assert (await site.tell(PROMPT, max_tokens=5))[0] == few
        await everything_is_back(site, before)

    nats = Nats()
    deployed(scenario, Etcd(), nats, discovery="etcd", events="nats", event_urls=[nats.url])
