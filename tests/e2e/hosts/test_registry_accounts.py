"""A deployment by an etcd with users and a NATS with a token for events; and one whose password is wrong."""

import asyncio

import pytest

from penstock.deploy.secret import SECRET_VARIABLE
from penstock.runtime.credentials import EVENTS_VARIABLE, REGISTRY_VARIABLE
from tests.support.faulty_registry import registry_is_connected
from tests.support.registry_accounts import PASSWORD, USER, EtcdWithUsers, NatsWithAccounts

pytestmark = [pytest.mark.slow, pytest.mark.needs("etcd", "nats-server")]
TOKEN = "a token of NATS"


def test_workers_register_and_events_arrive_by_accounts_of_the_environment(deploy, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of the test")
    monkeypatch.setenv(REGISTRY_VARIABLE, f"{USER}:{PASSWORD}")
    monkeypatch.setenv(EVENTS_VARIABLE, TOKEN)

    async def scenario(site):
        await site.until(lambda: registry_is_connected(site))
        _, usage = await site.tell("tell me about pipes", max_tokens=20)
        assert usage.completion_tokens == 20

    async def main():
        async with EtcdWithUsers() as etcd, NatsWithAccounts(f'authorization {{ token: "{TOKEN}" }}') as nats:
            await asyncio.to_thread(etcd.enable)
            runtime = {"discovery": "etcd", "urls": [etcd.url], "events": "nats", "event_urls": [nats.url]}
            await asyncio.to_thread(lambda: deploy(scenario, runtime=runtime))

    asyncio.run(main())
