"""A real etcd and a real NATS with TLS: certificates of another authority in the same files are used without a restart."""

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry

from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.etcd.discovery import EtcdDiscovery
from penstock.runtime.discovery.metrics import RegistryMetrics
from penstock.runtime.discovery.nats.discovery import NatsDiscovery
from penstock.runtime.handshake import Identity
from penstock.runtime.tls import PlaneTlsConfig
from penstock.testing.loop import run_async
from penstock.testing.planes.discovery import Watcher
from penstock.testing.planes.scripted_worker import scripted_instance
from tests.support.certificates import make_authority, make_certificate
from tests.support.registries import Etcd, Nats

pytestmark = [pytest.mark.slow, pytest.mark.needs("etcd", "nats-server", "openssl")]
CONFIG = DiscoveryConfig(lease_ttl_s=1.0, connect_timeout_s=10.0)


def issue(folder):
    """Make an authority and the certificates of a registry and of a host, in the files of those before."""
    authority = make_authority(folder, "authority")
    registry = make_certificate(folder, "registry", authority, address="127.0.0.1")
    return registry, make_certificate(folder, "host", authority)


@pytest.mark.parametrize(
    ("discovery", "server"), [(EtcdDiscovery, Etcd), (NatsDiscovery, Nats)], ids=["etcd", "nats"]
)
def test_another_authority_is_taken_without_a_restart(discovery, server, tmp_path):
    async def scenario():
        registry, host = issue(tmp_path)
        tls = PlaneTlsConfig(certificate=host.certificate, key=host.key, authority=host.authority)
        counted = CollectorRegistry()

        async def until_connected(value):
            name = "penstock_runtime_registry_connected"
            while counted.get_sample_value(name) != value:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)

        async with (
            server(tls=registry) as running,
            discovery(
                [running.url], Identity(secret=b"of the suite"), namespace="suite", rng=random.Random(1),
                tls=tls, config=CONFIG, metrics=RegistryMetrics(counted),
            ) as client,
        ):  # fmt: skip
            watcher = Watcher(client)
            await client.register(scripted_instance("tcp://127.0.0.1:1"))
            await until_connected(1)
            running.kill()
            await until_connected(0)
            issue(tmp_path)
            await asyncio.to_thread(running.start)
            await until_connected(1)
            await client.register(scripted_instance("tcp://127.0.0.1:2"))
            await watcher.until(lambda: len(watcher.present) == 2)

    run_async(scenario(), timeout_s=60.0)
