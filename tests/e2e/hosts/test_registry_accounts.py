"""A deployment by an etcd with users and a NATS with a token for events; and one whose password is wrong."""

import asyncio

import pytest

from penstock.deploy.secret import SECRET_VARIABLE
from penstock.runtime.credentials import EVENTS_VARIABLE, REGISTRY_VARIABLE
from tests.support.faulty_registry import registry_is_connected
from tests.support.registry_accounts import PASSWORD, USER, EtcdWithUsers, NatsWithAccounts
from tests.support.up import Up

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


def test_a_wrong_password_ends_the_start_with_one_line(runtime_dir, tmp_path):
    async def main():
        async with EtcdWithUsers() as server:
            await asyncio.to_thread(server.enable)
            host = Up(tmp_path, runtime_dir)
            host.environment |= {SECRET_VARIABLE: "a secret of the test", REGISTRY_VARIABLE: f"{USER}:hidden"}
            host.graph(runtime={"discovery": "etcd", "urls": [server.url]})
            return await asyncio.to_thread(lambda: host.run("up", "graph.yaml", check=False))

    refused = asyncio.run(main())
    assert refused.returncode == 2, refused
    assert "authentication failed" in refused.stderr
    assert REGISTRY_VARIABLE in refused.stderr
    assert "hidden" not in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr
