"""Discovery by Kubernetes: the suite, and API servers that die, hang, forget, compact, refuse and answer with errors."""

import asyncio
import os
import random
from functools import partial

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import InstanceState
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.metrics import RegistryMetrics
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes.access import KubernetesAccess
from penstock.runtime.kubernetes.client import LEASES, KubernetesClient, Resource
from penstock.runtime.kubernetes.pod import Pod
from penstock.testing.loop import run_async
from penstock.testing.planes.discovery import DiscoverySuite, Watcher
from penstock.testing.planes.scripted_worker import scripted_instance
from tests.support.kubernetes.discovery import CONFIG, IDENTITY, TTL_S, ApiServerHarness, ClusterHarness
from tests.support.kubernetes.faults import Faults

pytestmark = pytest.mark.slow  # leases lapse in real time
PODS = Resource("", "v1", "pods", "Pod")


class TestKubernetesDiscovery(DiscoverySuite):
    harness = ApiServerHarness
    lease_ttl_s = 3 * TTL_S  # an expired lease, the grace time, and the checks between


class RealClusterHarness(ClusterHarness):
    access = staticmethod(KubernetesAccess.find)


@pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG names no cluster")
class TestRealCluster(DiscoverySuite):
    harness = RealClusterHarness
    lease_ttl_s = 3 * TTL_S


def run_scenario(scenario):
    async def main():
        async with asyncio.timeout(60), ApiServerHarness() as harness:
            await scenario(harness)

    run_async(main())


async def until(condition):
    """Wait until something holds; the scenario's time limit bounds it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def value(metrics, name, **labels):
    return metrics.get_sample_value(f"penstock_runtime_{name}", labels)


async def known(harness, **options):
    """Register an instance, and watch it by another client."""
    instance = scripted_instance("tcp://127.0.0.1:1")
    registration = await (await harness.client(**options)).register(instance)
    metrics = CollectorRegistry()
    watcher = Watcher(await harness.client(metrics=RegistryMetrics(metrics)))
    await watcher.synced()
    assert watcher.present == {instance.worker_id: instance}
    await until(lambda: value(metrics, "registry_connected") == 1)
    return instance, registration, watcher, metrics


@pytest.mark.parametrize("forget", [False, True], ids=["with its objects", "without its objects"])
def test_what_is_known_outlives_a_dead_api_server(forget):
    async def scenario(harness):
        instance, registration, watcher, metrics = await known(harness)
        await harness.server.stop()
        if forget:
            harness.server.store.forget()
        draining = msgspec.structs.replace(instance, state=InstanceState.DRAINING)
        await registration.update(draining)
        await watcher.quiet(4 * TTL_S)
        assert value(metrics, "registry_connected") == 0
        await harness.server.start()
        await watcher.until(lambda: watcher.present == {instance.worker_id: draining})
        await until(lambda: value(metrics, "registry_connected") == 1)
        await quiet_but_syncs(watcher, 3 * TTL_S)
        assert not watcher.removed
        assert value(metrics, "registry_losses_total") == 1

    run_scenario(scenario)


async def quiet_but_syncs(watcher, seconds):
    """Take changes for so long; none may touch an instance."""
    present = dict(watcher.present)
    try:
        async with asyncio.timeout(seconds):
            while True:
                watcher.take(await anext(watcher.changes))
    except TimeoutError:
        assert watcher.present == present


def test_an_api_server_that_hangs_removes_nobody():
    async def scenario(harness):
        _, _, watcher, metrics = await known(harness)
        harness.server.pause()
        await asyncio.sleep(4 * TTL_S)
        harness.server.resume()
        await quiet_but_syncs(watcher, 4 * TTL_S)
        assert not watcher.removed
        await until(lambda: value(metrics, "registry_connected") == 1)

    config = DiscoveryConfig(lease_ttl_s=TTL_S, connect_timeout_s=0.5)

    async def main():
        async with asyncio.timeout(60), ApiServerHarness() as harness:
            harness.client = partial(harness.client, config=config)
            await scenario(harness)

    run_async(main())


def test_a_compacted_history_is_listed_again():
    async def scenario(harness):
        instance, registration, watcher, _ = await known(harness)
        syncs = watcher.syncs
        await harness.server.stop()
        for _ in range(3):  # the server's history moves on while the watcher is away
            harness.server.store.compact()
        await harness.server.start()
        harness.server.store.forget()
        await watcher.until(lambda: watcher.syncs > syncs)
        draining = msgspec.structs.replace(instance, state=InstanceState.DRAINING)
        await registration.update(draining)
        await watcher.until(lambda: watcher.present == {instance.worker_id: draining})
        assert not watcher.removed

    run_scenario(scenario)


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_the_api_server_lose_and_repeat_nothing(seed):
    """Dropped and expired watches, errors before and after the effect, throttling, lost answers: the last state is right."""

    async def scenario(harness):
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
        await quiet_but_syncs(watcher, 2 * TTL_S)
        assert harness.server.faults.count > 20
        harness.server.faults = Faults()

    run_scenario(scenario)


def test_a_lease_deleted_by_hand_comes_back():
    async def scenario(harness):
        instance, _, watcher, _ = await known(harness)
        for stored in harness.server.store.all(
            harness.server.store.kinds.find("coordination.k8s.io", "v1", "leases")
        ):
            harness.server.store.delete(lease_kind(harness), ("default", stored.body["metadata"]["name"]), {})
        await until(lambda: harness.server.store.all(lease_kind(harness)))
        await quiet_but_syncs(watcher, 3 * TTL_S)
        assert not watcher.removed
        assert watcher.present == {instance.worker_id: instance}

    run_scenario(scenario)


def lease_kind(harness):
    return harness.server.store.kinds.find("coordination.k8s.io", "v1", "leases")


def test_the_garbage_collector_takes_a_pods_registration():
    async def scenario(harness):
        (token,) = harness.server.tokens
        access = KubernetesAccess(harness.server.url, namespace="default", token=token)
        harness.server.rules.clear()
        async with KubernetesClient(access, timeout_s=10) as client:
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "decode-0"}, "spec": {}}
            pod = await client.create(PODS, body)
            _, _, watcher, _ = await known(harness, pod=Pod("decode-0", pod["metadata"]["uid"]))
            harness.server.forbidden.add(("patch", "leases"))  # the worker is gone with its pod
            harness.server.forbidden.add(("create", "leases"))
            await client.delete(PODS, "decode-0")
            assert not (await client.list(LEASES)).objects
            await watcher.until(lambda: not watcher.present)
            harness.server.forbidden.clear()

    run_scenario(scenario)


def test_a_lapsed_lease_without_a_pod_is_cleared_away():
    async def scenario(harness):
        instance = scripted_instance("tcp://127.0.0.1:1")
        await harness.start_member(instance)
        watcher = Watcher(await harness.client())
        await watcher.synced()
        await harness.kill_member(instance)
        await watcher.until(lambda: not watcher.present)
        await until(lambda: not harness.server.store.all(lease_kind(harness)))

    run_scenario(scenario)


def test_a_rotated_token_is_used(tmp_path):
    async def scenario(harness):
        file = tmp_path / "token"
        file.write_text("first")
        harness.server.tokens = {"first"}
        access = KubernetesAccess(harness.server.url, namespace="default", token_file=file)
        type(harness).access, kept = property(lambda _: lambda: access), type(harness).access
        try:
            _, _, watcher, metrics = await known(harness)
        finally:
            type(harness).access = kept
        for number in range(3):  # as the kubelet does: a new token, and the old one expires
            file.with_suffix(".new").write_text(f"rotated {number}")
            file.with_suffix(".new").replace(file)
            harness.server.tokens = {f"rotated {number}"}
            await quiet_but_syncs(watcher, 1.5 * TTL_S)
        assert not watcher.removed
        assert value(metrics, "registry_connected") == 1

    run_scenario(scenario)


def test_no_api_server_is_said_in_time():
    async def scenario(harness):
        await harness.server.stop()
        client = await harness.client(config=DiscoveryConfig(connect_timeout_s=0.5))
        with pytest.raises(Unavailable, match=r"Kubernetes at http://127.0.0.1"):
            await client.connect()
        with pytest.raises(Unavailable, match="is the API server of Kubernetes reachable"):
            await client.register(scripted_instance("tcp://127.0.0.1:1"))
        await harness.server.start()
        watcher = Watcher(client)
        await watcher.synced()
        assert not watcher.present, "what failed is not done later"

    run_scenario(scenario)


@pytest.mark.parametrize(("forbidden", "said"), [(True, "leases.*is forbidden"), (False, "HTTP 401")])
def test_missing_rights_are_said_with_what_to_grant(forbidden, said):
    async def scenario(harness):
        if forbidden:
            harness.server.forbidden.add(("list", "leases"))
        client = await harness.client()
        if not forbidden:
            harness.server.tokens = {"another"}
        with pytest.raises(
            ConfigError, match=rf"{said}.*give the service account of this pod get, list, watch"
        ):
            await client.connect()

    run_scenario(scenario)


def test_two_deployments_under_one_name_are_said_at_both_ends():
    async def scenario(harness):
        _, _, watcher, metrics = await known(harness)
        other = await harness.client(Identity(secret=b"of another deployment"))
        with capture_logs() as logs:
            with pytest.raises(ConfigError, match=r"namespace suite: .* two deployments share one"):
                await other.connect()
            await until(lambda: value(metrics, "refused_starts_total", reason="secret") == 1)
        (line,) = [line for line in logs if line["event"] == "start_refused"]
        assert line["reason"] == "secret"
        assert "runtime.namespace of its own" in line["fix"]
        with capture_logs() as logs:
            await other.register(scripted_instance("tcp://127.0.0.1:2"))
            await until(lambda: value(metrics, "registrations_refused_total", reason="secret") == 1)
        assert [line["event"] for line in logs] == ["registration_refused"]
        assert len(watcher.present) == 1
        separate = await harness.client(Identity(secret=b"of another deployment"), namespace="other")
        await separate.connect()

    run_scenario(scenario)


def test_many_registrations_are_read_in_pages(monkeypatch):
    monkeypatch.setattr("penstock.runtime.kubernetes.client._PAGE_OBJECTS", 7)

    async def scenario(harness):
        client = await harness.client()
        instances = [scripted_instance(f"tcp://127.0.0.1:{port}") for port in range(1, 51)]
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(client.register(instance))
        watcher = Watcher(await harness.client())
        await watcher.synced()
        assert watcher.present.keys() == {instance.worker_id for instance in instances}

    run_scenario(scenario)


def test_a_name_that_is_no_label_is_refused():
    async def scenario(harness):
        with pytest.raises(ConfigError, match="cannot be a label of Kubernetes"):
            await harness.client(IDENTITY, namespace="chat_")

    run_scenario(scenario)
    assert CONFIG.lease_ttl_s == TTL_S
