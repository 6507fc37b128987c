"""Discovery by Kubernetes, a real etcd and a real NATS: the suite, and registries that are killed, hang, forget, or are used by others."""

import asyncio
import os
import random
from contextlib import AsyncExitStack, suppress
from functools import partial

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import InstanceState
from penstock.deploy.manifests.network import DISCOVERY_RULES
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.etcd import EtcdClient, EtcdDiscovery
from penstock.runtime.discovery.kubernetes import KubernetesDiscovery
from penstock.runtime.discovery.nats import NatsDiscovery
from penstock.runtime.discovery.registrations import RegistryMetrics
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes import LEASES, KubernetesAccess, KubernetesClient, Pod, Resource
from penstock.testing.planes.discovery import DiscoverySuite, Watcher
from penstock.testing.planes.peer import Peer, member_peer
from penstock.testing.planes.scripted_worker import scripted_instance
from tests.support.kubernetes.api_server import ApiServer
from tests.support.kubernetes.faults import Faults
from tests.support.registries import Etcd, Nats

pytestmark = [pytest.mark.slow, pytest.mark.needs("etcd", "nats-server")]  # leases lapse in real time
IDENTITY = Identity(process="suite", secret=b"of the suite")
TTL_S = 1.0
CONFIG = DiscoveryConfig(lease_ttl_s=TTL_S, connect_timeout_s=10.0)
PODS = Resource("", "v1", "pods", "Pod")


class RegistryHarness:
    """A registry for each test; each member is a separate process."""

    def __init__(self, server, make_client):
        self.server = server()
        self.make_client = make_client
        self._members = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self):
        await self._stack.enter_async_context(self.server)
        return self

    async def __aexit__(self, *_):
        for member in self._members.values():
            await member.close()
        await self._stack.aclose()

    async def client(self, identity=IDENTITY, namespace="suite", config=CONFIG, **options):
        options |= {"namespace": namespace, "rng": random.Random(1), "config": config}
        client = self.make_client(self.place, identity, **options)
        return await self._stack.enter_async_context(client)

    async def start_member(self, instance):
        rng = random.Random(instance.worker_id)
        client = partial(self.make_client, self.place, IDENTITY, namespace="suite", rng=rng, config=CONFIG)
        self._members[instance.worker_id] = await Peer.start(member_peer, client, instance)

    async def kill_member(self, instance):
        await self._members[instance.worker_id].kill()

    @property
    def place(self):
        """Give what clients are made of."""
        return [self.server.url]

    async def kill(self):
        self.server.kill()

    async def start(self):
        await asyncio.to_thread(self.server.start)

    def forget(self):
        self.server.forget()


def discovery_of(access, identity, **options):
    api = KubernetesClient(access, timeout_s=options["config"].connect_timeout_s)
    return KubernetesDiscovery(api, identity, **options)


class ApiServerHarness(RegistryHarness):
    access = None

    def __init__(self):
        super().__init__(ApiServer, discovery_of)
        self.server.rules["suite-token"] = DISCOVERY_RULES
        self.kill, self.start, self.forget = self.server.stop, self.server.start, self.server.store.forget

    @property
    def place(self):
        return self.access or KubernetesAccess(self.server.url, namespace="default", token="suite-token")

    @property
    def leases(self):
        return self.server.store.all(self.lease_kind)

    @property
    def lease_kind(self):
        return self.server.store.kinds.find("coordination.k8s.io", "v1", "leases")


class ClusterHarness(ApiServerHarness):
    @property
    def place(self):
        return KubernetesAccess.find()


ETCD = partial(RegistryHarness, Etcd, EtcdDiscovery)
NATS = partial(RegistryHarness, Nats, NatsDiscovery)
all_of_them = pytest.mark.parametrize(
    "registry",
    [
        pytest.param(ETCD, id="etcd"),
        pytest.param(NATS, id="nats", marks=pytest.mark.nightly),
        pytest.param(ApiServerHarness, id="kubernetes", marks=pytest.mark.nightly),
    ],
)


class RegistrySuite(DiscoverySuite):
    lease_ttl_s = 3 * TTL_S  # an expired lease, the grace time, and what a registry takes to expire it


class TestEtcdDiscovery(RegistrySuite):
    harness = ETCD


class TestNatsDiscovery(RegistrySuite):
    harness = NATS


class TestKubernetesDiscovery(RegistrySuite):
    harness = ApiServerHarness


@pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG names no cluster")
class TestRealCluster(RegistrySuite):
    harness = ClusterHarness


del RegistrySuite


async def until(condition):
    """Wait until something holds; the test's time limit bounds it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def value(metrics, name, **labels):
    return metrics.get_sample_value(f"penstock_runtime_{name}", labels)


async def watching(harness, **options):
    watcher = Watcher(await harness.client(**options))
    await watcher.synced()
    return watcher


async def known(harness, **options):
    """Register an instance, and watch it by another client."""
    instance = scripted_instance("tcp://127.0.0.1:1")
    registration = await (await harness.client(**options)).register(instance)
    metrics = CollectorRegistry()
    watcher = await watching(harness, metrics=RegistryMetrics(metrics))
    assert watcher.present == {instance.worker_id: instance}
    await until(lambda: value(metrics, "registry_connected") == 1)
    return instance, registration, watcher, metrics


async def quiet_but_syncs(watcher, seconds):
    """Take changes for so long; none may touch an instance."""
    present = dict(watcher.present)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                watcher.take(await anext(watcher.changes))
    assert watcher.present == present
    assert not watcher.removed


@pytest.mark.parametrize(
    "forgets",
    [
        pytest.param(False, id="with its data", marks=pytest.mark.nightly),
        pytest.param(True, id="without its data"),
    ],
)
@all_of_them
async def test_what_is_known_outlives_a_killed_registry(forgets, registry):
    async with registry() as harness:
        instance, registration, watcher, metrics = await known(harness)
        await harness.kill()
        if forgets:
            harness.forget()
        draining = msgspec.structs.replace(instance, state=InstanceState.DRAINING)
        await registration.update(draining)
        await watcher.quiet(3 * TTL_S)
        assert value(metrics, "registry_connected") == 0
        await harness.start()
        await watcher.until(lambda: watcher.present == {instance.worker_id: draining})
        await until(lambda: value(metrics, "registry_connected") == 1)
        await quiet_but_syncs(watcher, 3 * TTL_S)
        assert value(metrics, "registry_losses_total") == 1


@all_of_them
async def test_a_registry_that_hangs_removes_nobody(registry):
    async with registry() as harness:
        _, _, watcher, metrics = await known(
            harness, config=DiscoveryConfig(lease_ttl_s=TTL_S, connect_timeout_s=2.0)
        )
        harness.server.pause()
        try:
            await asyncio.sleep(4 * TTL_S)  # the lease expires as soon as it goes on
        finally:
            harness.server.resume()
        await quiet_but_syncs(watcher, 4 * TTL_S)
        await until(lambda: value(metrics, "registry_connected") == 1)


@all_of_them
async def test_no_registry_is_said_in_time(registry):
    async with registry() as harness:
        await (await harness.client()).connect()  # one killed in its first moments never elects a leader
        await harness.kill()
        client = await harness.client(config=DiscoveryConfig(connect_timeout_s=0.5))
        with pytest.raises(Unavailable, match=r"(etcd|NATS|Kubernetes) at .*127.0.0.1"):
            await client.connect()
        with pytest.raises(
            Unavailable, match=r"is (etcd|nats-server|the API server of Kubernetes) (running|reach)"
        ):
            await client.register(scripted_instance("tcp://127.0.0.1:1"))
        await harness.start()
        watcher = Watcher(client)
        await watcher.synced()
        assert not watcher.present, "what failed is not done later"


@all_of_them
async def test_a_second_deployment_in_a_namespace_does_not_start_and_its_registrations_are_refused(registry):
    async with registry() as harness:
        _, _, watcher, metrics = await known(harness)
        other = await harness.client(Identity(secret=b"of another deployment"))
        with pytest.raises(ConfigError, match=r"namespace suite: .* two deployments share one"):
            await other.connect()
        with capture_logs() as logs:
            await other.register(scripted_instance("tcp://127.0.0.1:2"))
            await until(lambda: value(metrics, "registrations_refused_total", reason="secret") == 1)
        assert [line["event"] for line in logs] == ["registration_refused"]
        assert len(watcher.present) == 1
        separate = await harness.client(Identity(secret=b"of another deployment"), namespace="other")
        await separate.connect()


async def test_many_registrations_are_read_in_pages():
    async with ETCD() as harness:
        client = await harness.client(config=DiscoveryConfig(lease_ttl_s=60.0, connect_timeout_s=60.0))
        instances = [scripted_instance(f"tcp://127.0.0.1:{port}") for port in range(1, 601)]
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(client.register(instance))
        watcher = await watching(harness)
        assert watcher.present.keys() == {instance.worker_id for instance in instances}


async def test_a_compacted_history_of_etcd_is_said():
    async with ETCD() as harness:
        for _ in range(5):
            await (await harness.client()).register(scripted_instance("tcp://127.0.0.1:1"))
        async with EtcdClient([harness.server.url], timeout_s=10) as etcd:
            revision = (await etcd.read(b"/penstock/")).revision
            await asyncio.to_thread(harness.server.call, "kv/compaction", revision=revision, physical=True)
            with pytest.raises(Unavailable, match="compacted"):
                async for _ in etcd.watch(b"/penstock/", 1):
                    pass


async def test_a_compacted_history_of_kubernetes_is_listed_again():
    async with ApiServerHarness() as harness:
        instance, registration, watcher, _ = await known(harness)
        syncs = watcher.syncs
        await harness.kill()
        for _ in range(3):  # the server's history moves on while the watcher is away
            harness.server.store.compact()
        await harness.start()
        harness.forget()
        await watcher.until(lambda: watcher.syncs > syncs)
        draining = msgspec.structs.replace(instance, state=InstanceState.DRAINING)
        await registration.update(draining)
        await watcher.until(lambda: watcher.present == {instance.worker_id: draining})
        assert not watcher.removed


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
async def test_faults_of_the_api_server_lose_and_repeat_nothing(seed):
    """Dropped and expired watches, errors before and after the effect, throttling, lost answers: the last state is right."""
    async with ApiServerHarness() as harness:
        harness.server.faults = Faults(
            random.Random(seed),
            error=0.1, too_many=0.05, retry_after_s=0, drop=0.1, drop_watch=0.1, compact_watch=0.05, slow_s=0.01,
        )  # fmt: skip
        rng = random.Random(seed)
        config = DiscoveryConfig(lease_ttl_s=3 * TTL_S, connect_timeout_s=10, reconnect_delay_s_max=0.2)
        watcher = Watcher(await harness.client(config=config))
        clients = [await harness.client(config=config) for _ in range(3)]
        wanted, registrations = {}, []
        for port in range(1, 13):
            instance = scripted_instance(f"tcp://127.0.0.1:{port}")
            registrations.append(await rng.choice(clients).register(instance))
            wanted[instance.worker_id] = instance
            chosen = rng.choice(registrations)
            if chosen.instance.worker_id in wanted:
                if rng.random() < 0.4:
                    await chosen.close()
                    del wanted[chosen.instance.worker_id]
                else:
                    changed = msgspec.structs.replace(chosen.instance, problem=f"change {port}")
                    await chosen.update(changed)
                    wanted[changed.worker_id] = changed
        await watcher.until(lambda: watcher.present == wanted)
        removed = watcher.removed
        watcher.removed = []
        await quiet_but_syncs(watcher, 2 * TTL_S)
        assert {change.worker_id for change in removed}.isdisjoint(wanted)
        assert harness.server.faults.count > 20
        harness.server.faults = Faults()


async def test_a_lease_deleted_by_hand_comes_back():
    async with ApiServerHarness() as harness:
        _, _, watcher, _ = await known(harness)
        for stored in harness.leases:
            harness.server.store.delete(harness.lease_kind, ("default", stored.body["metadata"]["name"]), {})
        await until(lambda: harness.leases)
        await quiet_but_syncs(watcher, 3 * TTL_S)


async def test_the_garbage_collector_takes_a_pods_registration():
    async with ApiServerHarness() as harness:
        access = KubernetesAccess(harness.server.url, namespace="default", token="suite-token")
        harness.server.rules.clear()
        async with KubernetesClient(access, timeout_s=10) as client:
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "decode-0"}, "spec": {}}
            pod = await client.create(PODS, body)
            _, _, watcher, _ = await known(harness, pod=Pod("decode-0", pod["metadata"]["uid"]))
            harness.server.forbidden |= {
                ("patch", "leases"),
                ("create", "leases"),
            }  # the worker is gone with its pod
            await client.delete(PODS, "decode-0")
            assert not (await client.list(LEASES)).objects
            await watcher.until(lambda: not watcher.present)
            harness.server.forbidden.clear()


async def test_a_lapsed_lease_without_a_pod_is_cleared_away():
    async with ApiServerHarness() as harness:
        instance = scripted_instance("tcp://127.0.0.1:1")
        await harness.start_member(instance)
        watcher = await watching(harness)
        await harness.kill_member(instance)
        await watcher.until(lambda: not watcher.present)
        await until(lambda: not harness.leases)


async def test_a_rotated_token_is_used(tmp_path):
    async with ApiServerHarness() as harness:
        file = tmp_path / "token"
        file.write_text("suite-token")
        access = KubernetesAccess(harness.server.url, namespace="default", token_file=file)
        harness.access = access
        _, _, watcher, metrics = await known(harness)
        for number in range(3):  # as the kubelet does: a new token, and the old one expires
            file.with_suffix(".new").write_text(f"rotated {number}")
            file.with_suffix(".new").replace(file)
            harness.server.tokens = {f"rotated {number}"}
            await quiet_but_syncs(watcher, 1.5 * TTL_S)
        assert value(metrics, "registry_connected") == 1


@pytest.mark.parametrize(("forbidden", "said"), [(True, "leases.*is forbidden"), (False, "HTTP 401")])
async def test_missing_rights_are_said_with_what_to_grant(forbidden, said):
    async with ApiServerHarness() as harness:
        if forbidden:
            harness.server.forbidden.add(("list", "leases"))
        client = await harness.client()
        if not forbidden:
            harness.server.tokens = {"another"}
        with pytest.raises(
            ConfigError, match=rf"{said}.*give the service account of this pod get, list, watch"
        ):
            await client.connect()


async def test_a_name_that_is_no_label_is_refused():
    async with ApiServerHarness() as harness:
        with pytest.raises(ConfigError, match="cannot be a label of Kubernetes"):
            await harness.client(namespace="chat_")
