"""The local hub: the suite, and what only a hub that comes and goes can show."""

import asyncio
import os
import random
import signal
from contextlib import asynccontextmanager

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import ConfigError, Overloaded, Unavailable
from penstock.core.types.instances import InstanceState
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.local import LocalDiscovery, LocalHub
from penstock.runtime.discovery.registrations import RegistryMetrics
from penstock.runtime.handshake import Identity
from penstock.testing.planes.discovery import DiscoverySuite, LocalDiscoveryHarness, Watcher
from penstock.testing.planes.scripted_worker import scripted_instance


class TestLocalDiscovery(DiscoverySuite):
    harness = LocalDiscoveryHarness


@asynccontextmanager
async def hub_scene(config=None):
    async with LocalDiscoveryHarness(config) as harness:
        yield harness
        harness.hub.check()


async def test_a_killed_process_is_dropped_long_before_its_lease_ends():
    async with hub_scene(DiscoveryConfig(lease_ttl_s=600, linger_s=0.1)) as harness:
        instance = scripted_instance("tcp://127.0.0.1:1")
        await harness.start_member(instance)
        watcher = Watcher(await harness.client())
        await watcher.synced()
        await harness.kill_member(instance)
        await watcher.until(lambda: not watcher.present)
        assert "its process is gone" in watcher.removed[-1].reason


async def test_a_process_that_hangs_loses_its_lease_and_comes_back():
    async with hub_scene() as harness:
        instance = scripted_instance("tcp://127.0.0.1:1")
        await harness.start_member(instance)
        watcher = Watcher(await harness.client())
        await watcher.synced()
        pid = harness.pid(instance)
        os.kill(pid, signal.SIGSTOP)
        try:
            await watcher.until(lambda: not watcher.present)
        finally:
            os.kill(pid, signal.SIGCONT)
        await watcher.until(lambda: watcher.present == {instance.worker_id: instance})


async def test_a_broken_connection_is_made_again_and_nobody_notices():
    async with hub_scene(DiscoveryConfig(lease_ttl_s=6, linger_s=2)) as harness:
        client = await harness.client()
        instance = scripted_instance("tcp://127.0.0.1:1")
        await client.register(instance)
        watcher = Watcher(await harness.client())
        await watcher.synced()
        for connection in tuple(harness.hub.server.sessions):
            connection.channel.abort("the test breaks it")
        await watcher.synced()
        await watcher.quiet(2.5)
        assert watcher.present == {instance.worker_id: instance}


async def test_what_is_known_outlives_the_hub():
    async with hub_scene(DiscoveryConfig(lease_ttl_s=2.0, linger_s=0.1)) as harness:
        client = await harness.client()
        kept, changed, withdrawn = (scripted_instance(f"tcp://127.0.0.1:{i}") for i in (1, 2, 3))
        registrations = [await client.register(instance) for instance in (kept, changed, withdrawn)]
        watcher = Watcher(await harness.client())
        await watcher.synced()
        await harness.hub.close()
        draining = msgspec.structs.replace(changed, state=InstanceState.DRAINING)
        await registrations[1].update(draining)
        await registrations[2].close()
        await watcher.quiet(2 * harness.config.lease_ttl_s)
        assert len(watcher.present) == 3
        await harness.start_hub()
        await watcher.synced()
        await watcher.until(lambda: watcher.present.get(changed.worker_id) == draining)
        await watcher.until(lambda: watcher.present.keys() == {kept.worker_id, changed.worker_id})
        assert watcher.removed[-1].reason == "it did not register again with the restarted hub"
        assert [removed.worker_id for removed in watcher.removed] == [withdrawn.worker_id]


async def test_a_restarted_hub_drops_nobody_who_is_slow_to_come_back():
    async with hub_scene(DiscoveryConfig(lease_ttl_s=2.0, linger_s=0.1)) as harness:
        instance = scripted_instance("tcp://127.0.0.1:1")
        await harness.start_member(instance)
        watcher = Watcher(await harness.client())
        await watcher.synced()
        pid = harness.pid(instance)
        os.kill(pid, signal.SIGSTOP)  # it cannot register while watchers are back already
        try:
            await harness.hub.close()
            await harness.start_hub()
            await watcher.synced()
            assert watcher.present == {instance.worker_id: instance}
        finally:
            os.kill(pid, signal.SIGCONT)
        await watcher.quiet(2.5)
        assert len(harness.hub.table) == 1


async def test_another_secret_is_refused_and_those_that_watch_count_it():
    async with hub_scene(DiscoveryConfig(connect_timeout_s=0.3)) as harness:
        hub, registry = harness.hub, CollectorRegistry()

        def client(identity, metrics=None):
            rng = random.Random(1)
            return LocalDiscovery(hub.address, identity, rng=rng, config=harness.config, metrics=metrics)

        async with client(hub.identity, RegistryMetrics(registry)) as member:
            watcher = Watcher(member)
            await watcher.synced()
            async with client(Identity(secret=b"guess")) as intruder:
                said = ""
                while "deployment secret" not in said:  # a busy hub answers later
                    with pytest.raises(Unavailable) as refused:
                        await intruder.register(scripted_instance("tcp://127.0.0.1:1"))
                    said = refused.value.message
            assert "guess" not in said
            assert len(hub.table) == 0
            assert hub.refused_clients >= 1
            name = "penstock_runtime_hub_refused_clients"
            while registry.get_sample_value(name) != hub.refused_clients:  # noqa: ASYNC110 - the hub tells
                await asyncio.sleep(0.01)


async def test_a_client_that_never_says_hello_is_hung_up_on():
    async with hub_scene(DiscoveryConfig(connect_timeout_s=0.05)) as harness:
        path = harness.hub.address.removeprefix("unix://")
        reader, writer = await asyncio.open_unix_connection(path)
        await reader.read()
        writer.close()
        await writer.wait_closed()
        assert not harness.hub.server.sessions


async def test_registrations_are_bounded():
    async with hub_scene(DiscoveryConfig(instances_max=1)) as harness:
        client = await harness.client()
        first = await client.register(scripted_instance("tcp://127.0.0.1:1"))
        with pytest.raises(Overloaded, match="instances_max"):
            await client.register(scripted_instance("tcp://127.0.0.1:2"))
        await first.close()
        await client.register(scripted_instance("tcp://127.0.0.1:3"))


async def test_the_supervisor_watches_its_own_hub():
    async with hub_scene() as harness:
        client = await harness.client()
        watcher = Watcher(harness.hub)
        await watcher.synced()
        instance = scripted_instance("tcp://127.0.0.1:1")
        await client.register(instance)
        await watcher.until(lambda: watcher.present == {instance.worker_id: instance})


@pytest.mark.parametrize(
    ("listen", "secret", "what"),
    [
        ("tcp://127.0.0.1:0", b"", "needs a secret"),
        ("tcp://0.0.0.0:0", b"", "needs a secret"),
        ("tcp://127.0.0.1", b"s", "tcp://HOST:PORT"),
        ("unix://relative", b"", "unix:///PATH"),
        ("http://127.0.0.1:80", b"s", "is no address"),
    ],
)
def test_a_hub_that_others_could_reach_is_refused(listen, secret, what):
    with pytest.raises(ConfigError, match=what):
        LocalHub(Identity(secret=secret), listen=listen)
