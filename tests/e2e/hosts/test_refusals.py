"""Workers that refuse a frontend: a line at both ends, and metrics of both that say why."""

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.router.config import RouterConfig
from penstock.router.fleet.fleet import Fleet
from penstock.router.metrics import RouterMetrics
from penstock.runtime.discovery.memory import MemoryDiscovery
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.tcp import TcpPlane
from penstock.runtime.tls import PlaneTls, PlaneTlsConfig
from penstock.testing.loop import run_async
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
def test_another_secret(server_secret):
    async def scenario():
        logs = await refused(TcpPlane(Identity(secret=server_secret)), TcpPlane(OURS), "refused")
        assert "the two secrets differ" in logs["worker_unreachable"]["error"]
        assert "the two secrets differ" in logs["frontend_refused"]["error"]

    run_async(scenario())


def test_another_hash_key():
    async def scenario():
        other = Identity(secret=OURS.secret, hash_key=b"another key 1234")
        logs = await refused(TcpPlane(other), TcpPlane(OURS), "refused")
        assert "hash key" in logs["worker_unreachable"]["error"]
        assert "hash key" in logs["frontend_refused"]["error"]

    run_async(scenario())


@pytest.mark.needs("openssl")
def test_a_certificate_of_another_authority(tmp_path):
    def tls(name):
        files = make_certificate(tmp_path, f"{name}-host", make_authority(tmp_path, name))
        return PlaneTls(
            PlaneTlsConfig(certificate=files.certificate, key=files.key, authority=files.authority)
        )

    async def scenario():
        server, client = (TcpPlane(OURS, tls=tls(name)) for name in ("ours", "others"))
        logs = await refused(server, client, "tls")
        assert "certificate" in logs["worker_unreachable"]["error"]
        assert "tls_refused" in logs

    run_async(scenario())
