"""Requests, events and discovery by TLS: the suites, and certificates that are wrong, lacking or renewed."""

import asyncio
import random
import shutil
from functools import partial

import pytest
from structlog.testing import capture_logs

from penstock.core.errors import ConfigError, Unavailable, WorkerLost
from penstock.runtime.config import DiscoveryConfig, PlaneConfig
from penstock.runtime.discovery.local import LocalDiscovery, LocalHub
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.tcp import TcpPlane
from penstock.runtime.tls import PlaneTls, PlaneTlsConfig
from penstock.testing.planes.calls import CallsSuite
from penstock.testing.planes.event_plane import EventPlaneSuite
from penstock.testing.planes.harness import TcpPlaneHarness
from penstock.testing.planes.scripted_worker import RecordingSink, ScriptedWorker, scripted_instance
from tests.support.certificates import make_authority, make_certificate

pytestmark = pytest.mark.needs("openssl")
IDENTITY = Identity(secret=b"of the test")
SOON = PlaneConfig(connect_timeout_s=1.0)


def config_of(files, **fields):
    return PlaneTlsConfig(certificate=files.certificate, key=files.key, authority=files.authority, **fields)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    ours, other = make_authority(folder, "ours"), make_authority(folder, "other")
    return {
        "ours": config_of(make_certificate(folder, "host-1", ours)),
        "renewed": config_of(make_certificate(folder, "host-1-renewed", ours)),
        "other": config_of(make_certificate(folder, "stranger", other)),
        "authority": str(ours),
    }


class _OverTls:
    @pytest.fixture(autouse=True)
    def harness_with_certificates(self, certificates):
        type(self).harness = partial(TcpPlaneHarness, tls=certificates["ours"])


class TestTlsPlane(_OverTls, CallsSuite):
    pass


@pytest.mark.nightly
class TestTlsEvents(_OverTls, EventPlaneSuite):
    pass


async def connect(server_tls, client_tls):
    """Serve with one certificate and connect with another; return the renewed address of the instance."""
    plane = TcpPlane(
        IDENTITY, listen="tcp://127.0.0.1:0", tls=server_tls and PlaneTls(server_tls), config=SOON
    )
    server = await plane.serve(ScriptedWorker())
    client = TcpPlane(IDENTITY, tls=client_tls and PlaneTls(client_tls), config=SOON)
    try:
        connection = await client.connect(scripted_instance(server.address), RecordingSink())
        await connection.close()
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("server", "client"), [("ours", "other"), ("other", "ours"), ("ours", None), (None, "ours")]
)
async def test_certificates_that_do_not_fit_are_refused_and_both_ends_say_so(certificates, server, client):
    with capture_logs() as logs, pytest.raises(WorkerLost) as refused:
        await connect(certificates.get(server), certificates.get(client))
    assert "127.0.0.1" in refused.value.message
    if server and client:
        assert "certificate" in refused.value.message.lower()
        while not logs:  # noqa: ASYNC110 - the server's end
            await asyncio.sleep(0.01)
        assert [line["event"] for line in logs] == ["tls_refused"]


async def test_without_mutual_a_frontend_needs_no_certificate_of_the_authority(certificates):
    server = certificates["ours"].model_copy(update={"mutual": False})
    client = certificates["other"].model_copy(
        update={"authority": certificates["authority"], "mutual": False}
    )
    await connect(server, client)
    with pytest.raises(WorkerLost):
        await connect(certificates["ours"], client)


async def test_a_renewed_certificate_is_used_without_a_restart(certificates, tmp_path):
    files = {name: str(tmp_path / name) for name in ("certificate", "key", "authority")}

    def install(config):
        for name, path in files.items():
            shutil.copy(getattr(config, name), path)

    install(certificates["other"])
    server_tls = PlaneTls(PlaneTlsConfig(**files))
    plane = TcpPlane(IDENTITY, listen="tcp://127.0.0.1:0", tls=server_tls, config=SOON)
    server = await plane.serve(ScriptedWorker())
    client = TcpPlane(IDENTITY, tls=PlaneTls(certificates["ours"]), config=SOON)
    instance = scripted_instance(server.address)
    with pytest.raises(WorkerLost):
        await client.connect(instance, RecordingSink())
    install(certificates["renewed"])
    server_tls.reload()
    held = await client.connect(instance, RecordingSink())
    (tmp_path / "key").write_text("broken")
    server_tls.reload()  # logged; the files before stay
    again = await client.connect(instance, RecordingSink())
    await held.close()
    await again.close()
    await server.close()


async def test_the_hub_speaks_tls_too_and_tells_others_what_may_be_wrong(certificates):
    hub = LocalHub(IDENTITY, listen="tcp://127.0.0.1:0", tls=PlaneTls(certificates["ours"]))
    await hub.start()

    def client(certificate, timeout_s):
        config, tls = DiscoveryConfig(connect_timeout_s=timeout_s), certificate and PlaneTls(certificate)
        return LocalDiscovery(hub.address, IDENTITY, rng=random.Random(1), tls=tls, config=config)

    async with client(certificates["renewed"], 30.0) as ours:
        await ours.register(scripted_instance("tcp://127.0.0.1:1"))
        assert len(hub.table) == 1
    for certificate, said in (
        (certificates["other"], "(?i)certificate"),
        (None, r"sa(id|ys) (any|no)thing: it may want TLS"),
    ):
        async with client(certificate, 2.0) as stranger:
            with pytest.raises(Unavailable, match=said):
                await stranger.connect()
    await hub.close()


@pytest.mark.parametrize("field", ["certificate", "key", "authority"])
def test_a_file_that_is_not_there_is_named(certificates, field):
    config = certificates["ours"].model_copy(update={field: "/nowhere.pem"})
    with pytest.raises(ConfigError, match="nowhere"):
        PlaneTls(config)


def test_a_host_whose_certificate_others_would_refuse_says_so_at_its_start(certificates, tmp_path):
    authority = make_authority(tmp_path, "authority")
    expired = config_of(make_certificate(tmp_path, "expired", authority, days=-1))
    with pytest.raises(
        ConfigError, match=r"runtime\.tls\.certificate: .*expired\.pem: certificate has expired; .* renew it"
    ):
        PlaneTls(expired)
    strange = certificates["ours"].model_copy(update={"authority": str(authority)})
    with pytest.raises(
        ConfigError,
        match=r"unable to get local issuer certificate; expected one that .*authority\.pem signed",
    ):
        PlaneTls(strange)
