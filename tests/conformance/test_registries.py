"""Discovery by a real etcd and a real NATS: the suite, and servers that are killed, stopped, emptied or used by others."""

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import InstanceState
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.etcd.client import EtcdClient
from penstock.runtime.discovery.etcd.discovery import EtcdDiscovery
from penstock.runtime.discovery.metrics import RegistryMetrics
from penstock.runtime.discovery.nats.discovery import NatsDiscovery
from penstock.runtime.handshake import Identity
from penstock.testing.loop import run_async
from penstock.testing.planes.discovery import DiscoverySuite, Watcher
from penstock.testing.planes.peer import Peer, member_peer
from penstock.testing.planes.scripted_worker import scripted_instance
from tests.support.registries import Etcd, Nats

pytestmark = [pytest.mark.slow, pytest.mark.needs("etcd", "nats-server")]  # leases lapse in real time
IDENTITY = Identity(process="suite", secret=b"of the suite")
TTL_S = 1.0
CONFIG = DiscoveryConfig(lease_ttl_s=TTL_S, connect_timeout_s=10.0)


class RegistryHarness:
    """A server for each test; each member is a separate process."""

    def __init__(self, server, discovery):
        self.server = server()
        self._discovery = discovery
        self._members = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self):
        await self._stack.enter_async_context(self.server)
        return self

    async def __aexit__(self, *_):
        for member in self._members.values():
            await member.close()
        await self._stack.aclose()

    async def client(self, identity=IDENTITY, config=CONFIG, metrics=None, namespace="suite"):
        client = self._discovery(
            [self.server.url],
            identity,
            namespace=namespace,
            rng=random.Random(1),
            config=config,
            metrics=metrics,
        )
        return await self._stack.enter_async_context(client)

    async def start_member(self, instance):
        rng = random.Random(instance.worker_id)
        client = partial(
            self._discovery, [self.server.url], IDENTITY, namespace="suite", rng=rng, config=CONFIG
        )
        self._members[instance.worker_id] = await Peer.start(member_peer, client, instance)

    async def kill_member(self, instance):
        await self._members[instance.worker_id].kill()


ETCD = partial(RegistryHarness, Etcd, EtcdDiscovery)
NATS = partial(RegistryHarness, Nats, NatsDiscovery)
both = pytest.mark.parametrize("registry", [ETCD, NATS], ids=["etcd", "nats"])


class TestEtcdDiscovery(DiscoverySuite):
    harness = ETCD
    lease_ttl_s = 3 * TTL_S  # an expired lease, the grace time, and what etcd takes to expire it


class TestNatsDiscovery(DiscoverySuite):
    harness = NATS
    lease_ttl_s = 3 * TTL_S


def run_scenario(scenario, registry):
    async def main():
        async with asyncio.timeout(120), registry() as harness:
            await scenario(harness)

    run_async(main())


async def until(metrics, name, value, **labels):
    """Wait until a metric has a value."""
    while metrics.get_sample_value(f"penstock_runtime_{name}", labels) != value:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def known(harness):
    """Register an instance, and watch it by another client."""
    instance = scripted_instance("tcp://127.0.0.1:1")
    registration = await (await harness.client()).register(instance)
    metrics = CollectorRegistry()
    watcher = Watcher(await harness.client(metrics=RegistryMetrics(metrics)))
    await watcher.synced()
    assert watcher.present == {instance.worker_id: instance}
    await until(metrics, "registry_connected", 1)
    return instance, registration, watcher, metrics


@pytest.mark.parametrize("forget", [False, True], ids=["with its data", "without its data"])
@both
def test_what_is_known_outlives_a_killed_registry(forget, registry):
    async def scenario(harness):
        instance, registration, watcher, metrics = await known(harness)
        syncs = watcher.syncs
        harness.server.kill()
        if forget:
            harness.server.forget()
        draining = msgspec.structs.replace(instance, state=InstanceState.DRAINING)
        await registration.update(draining)
        await watcher.quiet(3 * TTL_S)
        assert metrics.get_sample_value("penstock_runtime_registry_connected") == 0
        await asyncio.to_thread(harness.server.start)
        await watcher.until(
            lambda: watcher.syncs > syncs and watcher.present == {instance.worker_id: draining}
        )
        await watcher.quiet(3 * TTL_S)
        assert not watcher.removed
        assert metrics.get_sample_value("penstock_runtime_registry_losses_total") == 1

    run_scenario(scenario, registry)


@both
def test_a_registry_that_hangs_removes_nobody(registry):
    async def scenario(harness):
        instance, _, watcher, _ = await known(harness)
        harness.server.pause()
        try:
            await asyncio.sleep(4 * TTL_S)  # the lease expires as soon as it goes on
        finally:
            harness.server.resume()
        while True:
            try:
                async with asyncio.timeout(4 * TTL_S):
                    watcher.take(await anext(watcher.changes))
            except TimeoutError:
                break
        assert watcher.present == {instance.worker_id: instance}
        assert not watcher.removed

    run_scenario(scenario, registry)


def test_a_compacted_history_is_listed_again():
    async def scenario(harness):
        client = await harness.client()
        for _ in range(5):
            await (await client.register(scripted_instance("tcp://127.0.0.1:1"))).close()
        async with EtcdClient([harness.server.url], timeout_s=10) as etcd:
            revision = (await etcd.read(b"/penstock/")).revision
            await etcd._call("kv/compaction", {"revision": revision, "physical": True})
            with pytest.raises(Unavailable, match="compacted"):
                async for _ in etcd.watch(b"/penstock/", 1):
                    pass
        watcher = Watcher(await harness.client())
        await watcher.synced()
        assert not watcher.present

    run_scenario(scenario, ETCD)


def test_many_registrations_are_read_in_pages():
    async def scenario(harness):
        client = await harness.client()
        instances = [scripted_instance(f"tcp://127.0.0.1:{port}") for port in range(1, 601)]
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(client.register(instance))
        watcher = Watcher(await harness.client())
        await watcher.synced()
        assert watcher.present.keys() == {instance.worker_id for instance in instances}

    run_scenario(scenario, ETCD)


@both
def test_no_registry_is_said_in_time(registry):
    async def scenario(harness):
        await (await harness.client()).connect()  # one killed in its first moments never elects a leader
        harness.server.kill()
        client = await harness.client(config=DiscoveryConfig(connect_timeout_s=0.5))
        with pytest.raises(Unavailable, match=r"(etcd|NATS) at .*127.0.0.1"):
            await client.connect()
        with pytest.raises(Unavailable, match=r"is (etcd|nats-server) running"):
            await client.register(scripted_instance("tcp://127.0.0.1:1"))
        await asyncio.to_thread(harness.server.start)
        watcher = Watcher(client)
        await watcher.synced()
        assert not watcher.present, "what failed is not done later"

    run_scenario(scenario, registry)


@both
def test_two_deployments_in_one_namespace_are_said_at_both_ends(registry):
    async def scenario(harness):
        _, _, watcher, metrics = await known(harness)
        other = await harness.client(Identity(secret=b"of another deployment"))
        with capture_logs() as logs:
            with pytest.raises(ConfigError, match=r"namespace suite: .* two deployments share one"):
                await other.connect()
            await until(metrics, "refused_starts_total", 1, reason="secret")
        (line,) = [line for line in logs if line["event"] == "start_refused"]
        assert line["reason"] == "secret"
        assert "runtime.namespace of its own" in line["fix"]
        with capture_logs() as logs:
            await other.register(scripted_instance("tcp://127.0.0.1:2"))
            await until(metrics, "registrations_refused_total", 1, reason="secret")
        assert [line["event"] for line in logs] == ["registration_refused"]
        assert len(watcher.present) == 1
        separate = await harness.client(Identity(secret=b"of another deployment"), namespace="other")
        await separate.connect()

    run_scenario(scenario, registry)
