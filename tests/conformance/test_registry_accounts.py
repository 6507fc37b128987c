"""A real etcd and a real NATS that ask for accounts: right and wrong ones, tokens that expire, passwords that change."""

import asyncio
import random
import time

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import ConfigError, Unavailable
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.credentials import Credentials
from penstock.runtime.discovery.etcd.client import EtcdClient
from penstock.runtime.discovery.etcd.discovery import EtcdDiscovery
from penstock.runtime.discovery.metrics import RegistryMetrics
from penstock.runtime.discovery.nats.discovery import NatsDiscovery
from penstock.runtime.events.nats.carrier import NatsCarrier
from penstock.runtime.handshake import Identity
from penstock.testing.loop import run_async
from penstock.testing.planes.discovery import Watcher
from penstock.testing.planes.scripted_worker import scripted_instance
from tests.support.registry_accounts import (
    PASSWORD,
    TOKEN_TTL_S,
    USER,
    EtcdWithUsers,
    NatsUser,
    NatsWithAccounts,
)

pytestmark = [pytest.mark.slow, pytest.mark.needs("etcd", "nats-server")]
IDENTITY = Identity(process="suite", secret=b"of the suite")
CONFIG = DiscoveryConfig(lease_ttl_s=1.0, connect_timeout_s=10.0)
SECONDS_MAX = 30.0
RIGHT = f"{USER}:{PASSWORD}"
USERS = f'authorization {{ users: [ {{ user: "{USER}", password: "{PASSWORD}" }} ] }}'
TOKEN = 'authorization { token: "a token" }'
ENOUGH = (
    f'authorization {{ users: [ {{ user: "{USER}", password: "{PASSWORD}",'
    ' permissions: { publish: ["$JS.API.>", "$KV.penstock_suite.>"], subscribe: "_INBOX.>" } } ] }'
)
LIMITED = (
    f'authorization {{ users: [ {{ user: "{USER}", password: "{PASSWORD}",'
    ' permissions: { publish: "other.>", subscribe: "_INBOX.>" } } ] }'
)


@pytest.fixture
def account(tmp_path):
    """Write an account into the file that clients read."""
    file = tmp_path / "account"

    def write(text):
        file.write_text(text)
        return Credentials(str(file), field="runtime.registry_credentials_file", variable="UNUSED")

    return write


def client_of(discovery, server, credentials, metrics=None):
    return discovery(
        [server.url], IDENTITY, namespace="suite", rng=random.Random(1), credentials=credentials, config=CONFIG,
        metrics=metrics,
    )  # fmt: skip


async def started(server):
    """Give an etcd its users."""
    if isinstance(server, EtcdWithUsers):
        await asyncio.to_thread(server.enable)


async def is_used(discovery, server, credentials):
    """Register and watch by one client."""
    async with client_of(discovery, server, credentials) as client:
        await client.connect()
        watcher = Watcher(client)
        instance = scripted_instance("tcp://127.0.0.1:1")
        await client.register(instance)
        await watcher.until(lambda: watcher.present == {instance.worker_id: instance})


def test_etcd_takes_its_user(account):
    async def scenario():
        async with EtcdWithUsers() as server:
            server.prefix = b"/penstock/suite/"
            await started(server)
            await is_used(EtcdDiscovery, server, account(RIGHT + "\n"))

    run_async(scenario(), timeout_s=60.0)


def test_an_etcd_without_users_asks_for_none(account):
    async def scenario():
        async with EtcdWithUsers() as server:
            await is_used(EtcdDiscovery, server, account(RIGHT))

    run_async(scenario(), timeout_s=60.0)


@pytest.mark.parametrize("configuration", [USERS, ENOUGH, TOKEN], ids=["user", "few rights", "token"])
def test_nats_takes_a_password_or_a_token(account, configuration):
    async def scenario():
        async with NatsWithAccounts(configuration) as server:
            await is_used(NatsDiscovery, server, account("a token\n" if configuration == TOKEN else RIGHT))

    run_async(scenario(), timeout_s=60.0)


@pytest.mark.parametrize("kind", ["nkey", "creds"])
def test_nats_takes_a_key(account, kind):
    pytest.importorskip("nkeys")
    user = NatsUser()

    async def scenario():
        configuration, text = (user.by_key, user.seed) if kind == "nkey" else (user.by_jwt, user.creds)
        async with NatsWithAccounts(configuration) as server:
            await is_used(NatsDiscovery, server, account(text))

    run_async(scenario(), timeout_s=60.0)


@pytest.mark.parametrize(
    ("discovery", "make", "text", "said"),
    [
        (EtcdDiscovery, EtcdWithUsers, f"{USER}:wrong", "user 'penstock': .*authentication failed.* in runtime.registry"),
        (EtcdDiscovery, EtcdWithUsers, None, "asks for a user, and none is given"),
        (NatsDiscovery, lambda: NatsWithAccounts(USERS), f"{USER}:wrong", "(?i)authorization violation.* in runtime.registry"),
        (NatsDiscovery, lambda: NatsWithAccounts(TOKEN), "wrong", "(?i)authorization violation"),
        (NatsDiscovery, lambda: NatsWithAccounts(USERS), None, "(?i)authorization violation"),
        (NatsDiscovery, lambda: NatsWithAccounts(LIMITED), RIGHT, "(?i)permissions violation.*JetStream"),
        (NatsCarrier, lambda: NatsWithAccounts(USERS), f"{USER}:wrong", "(?i)authorization violation"),
    ],
    ids=["etcd password", "etcd none", "nats password", "nats token", "nats none", "nats rights", "nats events"],
)  # fmt: skip
def test_another_account_is_refused_in_one_line(account, discovery, make, text, said):
    async def scenario():
        async with make() as server:
            await started(server)
            credentials = None if text is None else account(text)
            begun = time.monotonic()
            fields = {"namespace": "suite", "rng": random.Random(1), "credentials": credentials}
            fields |= {"connection": CONFIG} if discovery is NatsCarrier else {"config": CONFIG}
            async with discovery([server.url], IDENTITY, **fields) as client:
                with pytest.raises(ConfigError, match=said) as refused:
                    await client.connect()
            assert time.monotonic() - begun < SECONDS_MAX
            assert "wrong" not in refused.value.message
            assert "\n" not in refused.value.message

    run_async(scenario(), timeout_s=90.0)


def test_keys_of_others_are_refused(account):
    async def scenario():
        async with EtcdWithUsers() as server:
            await started(server)
            async with EtcdClient([server.url], timeout_s=10, credentials=account(RIGHT)) as client:
                await client.read(b"/penstock/")
                with pytest.raises(
                    Exception, match=r"permission denied; give the user of runtime.registry.* readwrite"
                ):
                    await client.read(b"/others/")

    run_async(scenario(), timeout_s=60.0)


def test_tokens_that_expire_or_are_lost_are_asked_for_again(account):
    async def scenario():
        async with EtcdWithUsers() as server:
            await started(server)
            async with EtcdClient([server.url], timeout_s=3, credentials=account(RIGHT)) as client:

                async def read():
                    while True:
                        try:
                            return await client.read(b"/penstock/")
                        except Unavailable:
                            assert time.monotonic() < deadline
                            await asyncio.sleep(0.05)

                deadline = time.monotonic() + 2 * SECONDS_MAX
                await read()
                first = client._user.token
                while client._user.token == first:  # asked again, a token is young again
                    assert time.monotonic() < deadline
                    await asyncio.sleep(2 * TOKEN_TTL_S)
                    await read()
                second = client._user.token
                server.kill()
                server.forget()
                await asyncio.to_thread(server.start)
                await read()  # it has lost its users, and asks for none
                await started(server)
                await asyncio.gather(*(read() for _ in range(8)))
                assert client._user.token not in {None, first, second}

    run_async(scenario(), timeout_s=120.0)


@pytest.mark.parametrize("discovery", [EtcdDiscovery, NatsDiscovery], ids=["etcd", "nats"])
def test_a_changed_password_is_taken_without_a_restart(account, discovery):
    async def scenario():
        async with EtcdWithUsers() if discovery is EtcdDiscovery else NatsWithAccounts(USERS) as server:
            await started(server)
            counted = CollectorRegistry()

            async def until_connected(value):
                while counted.get_sample_value("penstock_runtime_registry_connected") != value:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.05)

            async with client_of(discovery, server, account(RIGHT), RegistryMetrics(counted)) as client:
                watcher = Watcher(client)
                await client.register(scripted_instance("tcp://127.0.0.1:1"))
                await until_connected(1)
                if discovery is EtcdDiscovery:
                    await asyncio.to_thread(server.change_password, "another")
                server.kill()
                await until_connected(0)
                if discovery is NatsDiscovery:
                    server.configuration = USERS.replace(PASSWORD, "another")
                await asyncio.to_thread(server.start)
                account(f"{USER}:another")
                await until_connected(1)
                await client.register(scripted_instance("tcp://127.0.0.1:2"))
                await watcher.until(lambda: len(watcher.present) == 2)
                assert not watcher.removed

    run_async(scenario(), timeout_s=120.0)
