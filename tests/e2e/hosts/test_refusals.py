"""Workers that refuse a frontend: a line at both ends, and metrics of both that say why."""

import asyncio
import random
import re

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.core.errors import Unavailable
from penstock.router.config import RouterConfig
from penstock.router.fleet.fleet import Fleet
from penstock.router.metrics import RouterMetrics
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.hub import LocalHub
from penstock.runtime.discovery.local import LocalDiscovery
from penstock.runtime.discovery.memory import MemoryDiscovery
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.tcp import TcpPlane
from penstock.runtime.tls import PlaneTls, PlaneTlsConfig
from penstock.testing.planes.scripted_worker import ScriptedWorker, scripted_instance
from tests.support.certificates import make_authority, make_certificate

OURS = Identity(secret=b"a secret")


async def refused(server, client, reason):
    """Have a fleet that `client` connects find a worker that `server` serves; return the logs once it was refused."""
    worker = ScriptedWorker()
    serving = await server.serve(worker)
    discovery, registry = MemoryDiscovery(), CollectorRegistry()
    await discovery.register(scripted_instance(serving.address))
    fleet = Fleet(
        discovery, client, config=RouterConfig(), metrics=RouterMetrics(registry), rng=random.Random(1)
    )
    with capture_logs() as logs:
        running = asyncio.create_task(fleet.run())
        name = "penstock_router_connect_failures_total"
        while not registry.get_sample_value(name, {"reason": reason}):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait((running,))
    await serving.close()
    assert set(worker.refusals) == {reason}, "the worker counts them, too"
    return {log["event"]: log for log in logs}


@pytest.mark.parametrize("server_secret", [b"another secret", b""])
async def test_another_secret(server_secret):
    logs = await refused(TcpPlane(Identity(secret=server_secret)), TcpPlane(OURS), "refused")
    assert "the two secrets differ" in logs["worker_unreachable"]["error"]
    assert "the two secrets differ" in logs["frontend_refused"]["error"]


async def test_another_hash_key():
    other = Identity(secret=OURS.secret, hash_key=b"another key 1234")
    logs = await refused(TcpPlane(other), TcpPlane(OURS), "refused")
    assert "hash key" in logs["worker_unreachable"]["error"]
    assert "hash key" in logs["frontend_refused"]["error"]


def tls_of(files):
    return PlaneTls(PlaneTlsConfig(certificate=files.certificate, key=files.key, authority=files.authority))


@pytest.mark.needs("openssl")
async def test_a_certificate_of_another_authority(tmp_path):
    def tls(name):
        return tls_of(make_certificate(tmp_path, f"{name}-host", make_authority(tmp_path, name)))

    server, client = (TcpPlane(OURS, tls=tls(name)) for name in ("ours", "others"))
    logs = await refused(server, client, "tls")
    assert "certificate" in logs["worker_unreachable"]["error"]
    assert "tls_refused" in logs


async def joined(hub, identity, tls=None):
    """Have a host with these join a hub; return what it is told, and the logs of both."""
    config = DiscoveryConfig(connect_timeout_s=5)
    with capture_logs() as logs:
        await hub.start()
        discovery = LocalDiscovery(hub.address, identity, rng=random.Random(1), tls=tls, config=config)
        async with discovery:
            with pytest.raises(Unavailable) as told:
                await discovery.connect()
        await hub.close()
    return told.value.message, logs


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        (Identity(secret=b"another secret"), "the two secrets differ"),
        (Identity(secret=OURS.secret, hash_key=b"another key 1234"), "give all hosts .* a graph of one name"),
    ],
    ids=["secret", "name"],
)
async def test_a_host_that_the_hub_refuses_is_told_once_and_at_once(identity, why):
    told, logs = await joined(LocalHub(OURS), identity)
    assert re.search(why, told)
    assert "is the supervisor running" not in told
    refusals = [log["error"] for log in logs if log["event"] == "client_refused"]
    assert len(refusals) == 1
    assert re.search(why, refusals[0])


@pytest.mark.needs("openssl")
async def test_a_host_whose_certificate_the_hub_does_not_trust_is_told_so_at_both_ends(tmp_path):
    ours, others = make_authority(tmp_path, "ours"), make_authority(tmp_path, "others")
    hub_tls = tls_of(make_certificate(tmp_path, "hub", ours))
    trusts_both = tmp_path / "both.pem"
    trusts_both.write_bytes(ours.read_bytes() + others.read_bytes())
    host = make_certificate(tmp_path, "host", others)
    host_tls = tls_of(host.model_copy(update={"authority": str(trusts_both)}))
    hub = LocalHub(OURS, tls=hub_tls, config=DiscoveryConfig(connect_timeout_s=10))
    told, logs = await joined(hub, OURS, host_tls)
    assert "refuse this host's certificate" in told
    assert "is the supervisor running" not in told
    refused = next(log for log in logs if log["event"] == "tls_refused")
    assert refused["error"] == "self-signed certificate in certificate chain"
