"""Of several operators one acts; another goes on when it ends, dies or cannot reach the API server."""

import asyncio

import pytest

from penstock.runtime.kubernetes.client import LEASES

pytestmark = pytest.mark.slow


async def holder(here):
    lease = await here.client.find(LEASES, "penstock-operator")
    return (lease or {}).get("spec", {}).get("holderIdentity")


def test_one_acts_and_the_next_begins_at_once_when_it_ends(site):
    async def scenario(here):
        first = here.start_operator("first", lease_s=60)
        await here.until(lambda: is_holder(here, "first"))
        here.start_operator("second", lease_s=2)
        await here.apply()
        await here.serves()
        assert await holder(here) == "first"
        first.cancel()
        await here.until(lambda: is_holder(here, "second"))  # long before 60 s
        await here.apply(block_size=32)
        await here.serves()

    site(scenario, operator=False)


async def is_holder(here, name):
    return await holder(here) == name


def test_a_lease_that_nobody_renews_is_taken_after_its_time(site):
    async def scenario(here):
        lease = {
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "penstock-operator"},
            "spec": {"holderIdentity": "dead", "leaseDurationSeconds": 1, "renewTime": "2099-01-01T00:00:00.000000Z"},
        }  # fmt: skip
        await here.client.create(LEASES, lease)
        here.start_operator("second")
        await asyncio.sleep(0.5)
        assert await holder(here) == "dead", "its clock may be wrong, but it may live"
        await here.until(lambda: is_holder(here, "second"))

    site(scenario, operator=False)


def test_a_leader_whose_lease_was_taken_stops(site):
    async def scenario(here):
        here.start_operator("first")
        await here.until(lambda: is_holder(here, "first"))
        await here.client.patch(
            LEASES, "penstock-operator", {"spec": {"holderIdentity": "other", "leaseDurationSeconds": 60}}
        )
        await here.until(lambda: not here.server._handlers)  # its watches have ended
        await here.apply()
        requests = len(here.server.requests)
        await asyncio.sleep(0.6)
        acted = [
            request
            for request in here.server.requests[requests:]
            if request[0] in {"patch", "create", "delete"}
        ]
        assert acted == []
        assert await here.status() == {}

    site(scenario, operator=False)


def test_an_api_server_that_was_away_finds_its_operator_again(site):
    async def scenario(here):
        await here.apply()
        await here.serves()
        await here.server.stop()
        await asyncio.sleep(1.5)  # the lead is lost
        await here.server.start()
        await here.apply(block_size=32)
        await here.serves()

    site(scenario)
