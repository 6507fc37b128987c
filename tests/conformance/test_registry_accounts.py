"""A real etcd and a real NATS that ask for accounts and certificates: right and wrong ones, and others without a restart."""

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import ConfigError, PenstockError, Unavailable
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.credentials import Credentials
from penstock.runtime.discovery.etcd import EtcdClient, EtcdDiscovery
from penstock.runtime.discovery.nats import NatsDiscovery
from penstock.runtime.discovery.registrations import RegistryMetrics
from penstock.runtime.events.nats import NatsCarrier
from penstock.runtime.handshake import Identity
from penstock.runtime.tls import PlaneTlsConfig
from penstock.testing.planes.discovery import Watcher
from penstock.testing.planes.scripted_worker import scripted_instance
from tests.support.certificates import make_authority, make_certificate
from tests.support.registries import Etcd, Nats
from tests.support.registry_accounts import (
    PASSWORD,
    TOKEN_TTL_S,
    USER,
    EtcdWithUsers,
    NatsUser,
    NatsWithAccounts,
)

pytestmark = [pytest.mark.slow, pytest.mark.needs("etcd", "nats-server", "openssl")]
CONFIG = DiscoveryConfig(lease_ttl_s=1.0, connect_timeout_s=10.0)
RIGHT, WRONG = f"{USER}:{PASSWORD}", f"{USER}:wrong"


def users(permissions=""):
    return f'authorization {{ users: [ {{ user: "{USER}", password: "{PASSWORD}"{permissions} }} ] }}'


USERS, TOKEN = users(), 'authorization { token: "a token" }'
ENOUGH = users(', permissions: { publish: ["$JS.API.>", "$KV.penstock_suite.>"], subscribe: "_INBOX.>" }')
LIMITED = users(', permissions: { publish: "other.>", subscribe: "_INBOX.>" }')


class EtcdWithAccounts(EtcdWithUsers):
    """An etcd whose user has a password and the keys of one namespace alone."""

    prefix = b"/penstock/suite/"

    async def __aenter__(self):
        await super().__aenter__()
        await asyncio.to_thread(self.enable)
        return self


@pytest.fixture
def account(tmp_path):
    """Write an account into the file that clients read."""
    file = tmp_path / "account"

    def write(text):
        file.write_text(text)
        return Credentials(str(file), field="runtime.registry_credentials_file", variable="UNUSED")

    return write


def client_of(make, server, **options):
    config = {"connection" if make is NatsCarrier else "config": CONFIG}
    identity = Identity(process="suite", secret=b"of the suite")
    return make([server.url], identity, namespace="suite", rng=random.Random(1), **config | options)


async def is_used(client):
    """Register and watch by one client."""
    await client.connect()
    watcher = Watcher(client)
    instance = scripted_instance("tcp://127.0.0.1:1")
    await client.register(instance)
    await watcher.until(lambda: watcher.present == {instance.worker_id: instance})


def by_key(user):
    return user.by_key, user.seed


def by_jwt(user):
    return user.by_jwt, user.creds


@pytest.mark.parametrize("make", [EtcdWithAccounts, EtcdWithUsers], ids=["with users", "that asks for none"])
async def test_etcd_takes_its_user(account, make):
    async with (
        make() as server,
        client_of(EtcdDiscovery, server, credentials=account(RIGHT + "\n")) as client,
    ):
        await is_used(client)


@pytest.mark.parametrize(
    ("configuration", "text"),
    [(USERS, RIGHT), (ENOUGH, RIGHT), (TOKEN, "a token\n"), (by_key, ""), (by_jwt, "")],
    ids=["user", "few rights", "token", "nkey", "creds"],
)
async def test_nats_takes_an_account(account, configuration, text):
    if callable(configuration):
        pytest.importorskip("nkeys")
        configuration, text = configuration(NatsUser())
    async with (
        NatsWithAccounts(configuration) as server,
        client_of(NatsDiscovery, server, credentials=account(text)) as client,
    ):
        await is_used(client)


@pytest.mark.parametrize(
    ("discovery", "configuration", "text", "said"),
    [
        (EtcdDiscovery, "", WRONG, "user 'penstock': .*authentication failed.* in runtime.registry"),
        (EtcdDiscovery, "", None, "asks for a user, and none is given"),
        (NatsDiscovery, USERS, WRONG, "(?i)authorization violation.* in runtime.registry"),
        (NatsDiscovery, TOKEN, "wrong", "(?i)authorization violation"),
        (NatsDiscovery, USERS, None, "(?i)authorization violation"),
        (NatsDiscovery, LIMITED, RIGHT, "(?i)permissions violation.*JetStream"),
        (NatsCarrier, USERS, WRONG, "(?i)authorization violation"),
    ],
    ids=["etcd password", "etcd none", "nats password", "nats token", "nats none", "nats rights", "nats events"],
)  # fmt: skip
async def test_another_account_is_refused_in_one_line(account, discovery, configuration, text, said):
    credentials = None if text is None else account(text)
    async with (
        NatsWithAccounts(configuration) if configuration else EtcdWithAccounts() as server,
        client_of(discovery, server, credentials=credentials) as client,
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            await client.connect()
        assert "wrong" not in refused.value.message
        assert "\n" not in refused.value.message


async def test_keys_of_others_are_refused(account):
    async with (
        EtcdWithAccounts() as server,
        EtcdClient([server.url], timeout_s=10, credentials=account(RIGHT)) as client,
    ):
        await client.read(b"/penstock/suite/")
        with pytest.raises(
            PenstockError, match=r"permission denied; give the user of runtime.registry.* readwrite"
        ):
            await client.read(b"/others/")


async def test_tokens_that_expire_or_are_lost_are_asked_for_again(account):
    async with (
        EtcdWithAccounts() as server,
        EtcdClient([server.url], timeout_s=3, credentials=account(RIGHT)) as client,
    ):

        async def read():
            while True:
                try:
                    return await client.read(b"/penstock/suite/")
                except Unavailable:
                    await asyncio.sleep(0.05)

        await read()
        await asyncio.sleep(2 * TOKEN_TTL_S)  # etcd forgets the token
        await client.read(b"/penstock/suite/")
        server.kill()
        server.forget()
        await asyncio.to_thread(server.start)
        await read()  # it has lost its users, and asks for none
        await asyncio.to_thread(server.enable)
        await asyncio.gather(*(read() for _ in range(8)))


async def comes_back(client, server, counted, change):
    """Register, `change` something, have the server away, and register again."""

    async def until_connected(value):
        while counted.get_sample_value("penstock_runtime_registry_connected") != value:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)

    watcher = Watcher(client)
    await client.register(scripted_instance("tcp://127.0.0.1:1"))
    await until_connected(1)
    await asyncio.to_thread(change)
    server.kill()
    await until_connected(0)
    await asyncio.to_thread(server.start)
    await until_connected(1)
    await client.register(scripted_instance("tcp://127.0.0.1:2"))
    await watcher.until(lambda: len(watcher.present) == 2)
    assert not watcher.removed


@pytest.mark.parametrize(
    "discovery", [EtcdDiscovery, pytest.param(NatsDiscovery, marks=pytest.mark.nightly)], ids=["etcd", "nats"]
)
async def test_a_changed_password_is_taken_without_a_restart(account, discovery):
    counted = CollectorRegistry()

    def change():
        account(f"{USER}:another")
        if discovery is EtcdDiscovery:
            server.change_password("another")
        else:
            server.configuration = USERS.replace(PASSWORD, "another")

    async with (
        EtcdWithAccounts() if discovery is EtcdDiscovery else NatsWithAccounts(USERS) as server,
        client_of(discovery, server, credentials=account(RIGHT), metrics=RegistryMetrics(counted)) as client,
    ):
        await comes_back(client, server, counted, change)


@pytest.mark.parametrize(
    ("discovery", "server"),
    [(EtcdDiscovery, Etcd), pytest.param(NatsDiscovery, Nats, marks=pytest.mark.nightly)],
    ids=["etcd", "nats"],
)
async def test_certificates_of_another_authority_are_taken_without_a_restart(discovery, server, tmp_path):
    def issue():
        """Make an authority and the certificates of a registry and of a host, in the files of those before."""
        authority = make_authority(tmp_path, "authority")
        registry = make_certificate(tmp_path, "registry", authority, address="127.0.0.1")
        return registry, make_certificate(tmp_path, "host", authority)

    registry, host = issue()
    tls = PlaneTlsConfig(certificate=host.certificate, key=host.key, authority=host.authority)
    counted = CollectorRegistry()
    async with (
        server(tls=registry) as running,
        client_of(discovery, running, tls=tls, metrics=RegistryMetrics(counted)) as client,
    ):
        await comes_back(client, running, counted, issue)
