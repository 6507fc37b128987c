"""Connections of hosts to the planner: what is refused, said at both ends, and obeyed once."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import structlog

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import Role
from penstock.deploy.control.messages import Add
from penstock.deploy.hosts import host_link
from penstock.deploy.hosts.connector import HostsConnector
from penstock.deploy.hosts.messages import Order
from penstock.deploy.hosts.planner_server import PlannerServer
from penstock.deploy.messages import Planned
from penstock.planner.observe.stream import ObservationStream
from penstock.runtime.observations.windows import RequestWindow
from penstock.testing.loop import run_async
from tests.support.linked_hosts import identity, link, linked, pool_of

A = Role.AGGREGATED


@asynccontextmanager
async def one_host():
    connector = HostsConnector(settle_s=0.0)
    async with pool_of({A: 1}, 8) as pool, linked(connector, {"b": pool}) as server:
        yield connector, server, pool


async def until(holds):
    while not holds():  # noqa: ASYNC110 - the test's time limit bounds it
        await asyncio.sleep(0.01)


def host_sends(host, *sources):
    """Send a window of each once the host, too, knows that it is connected: until then they are lost."""
    if host._session is None:
        return False
    for source in sources:
        host.window(source, RequestWindow(seconds=1.0, arrivals=7))
    return True


async def test_windows_arrive_under_the_name_of_their_host_and_a_lost_host_is_said():
    connector, seen = HostsConnector(settle_s=0.0), ObservationStream()
    async with (
        pool_of({A: 1}) as pool,
        PlannerServer("tcp://127.0.0.1:0", identity(), connector, seen) as server,
        link(server, "b", pool) as host,
    ):
        await until(lambda: "b" in server.linked and host_sends(host, "stranger", "frontend-1"))
        await until(lambda: seen.observe(10).frontends)
        assert seen.observe(10).frontends == ("frontend-1@b",)
        assert (await connector.scale()).replicas[0].name == "worker-1@b"
    assert not (await connector.scale()).replicas, "it said goodbye"


async def test_sources_of_a_host_that_was_given_up_are_silent_no_more():
    connector, seen = (
        HostsConnector(settle_s=0.0, lost_after_s=0.0, hold_s=0.2),
        ObservationStream(silent_after_s=0.0),
    )
    async with (
        pool_of({A: 1}) as pool,
        PlannerServer("tcp://127.0.0.1:0", identity(), connector, seen) as server,
        link(server, "b", pool) as host,
    ):
        await until(lambda: "b" in server.linked and host_sends(host, "worker-1"))
        await until(lambda: seen.observe(10).silent == ("frontend-1@b", "worker-1@b"))
        host._keeper.cancel()
        server.linked["b"]._channel.abort("the cable is cut")
        await until(lambda: not server.linked)
        assert seen.observe(10).silent == ("frontend-1@b", "worker-1@b"), "it may come back"
        await asyncio.sleep(0.3)
        await connector.scale()
        assert seen.observe(10).silent == ()


@pytest.mark.parametrize(
    ("name", "secret", "reason"),
    [
        ("c", b"a guess of a stranger", "deployment secret"),
        ("b", None, "b is connected already"),
        ("a", None, "a is connected already"),
        ("x@y", None, "must be a printable name"),
    ],
)
def test_who_is_refused_hears_why_at_both_ends_and_is_not_scaled(name, secret, reason):
    async def main():
        async with one_host() as (_, server, _pool), pool_of({A: 1}) as other:
            stranger = link(server, name, other, **({} if secret is None else {"secret": secret}))
            async with stranger:
                await until(lambda: {"host_refused", "planner_unreachable"} <= {e["event"] for e in said})
            assert set(server.linked) == {"b"}
            counted = server.with_refused(Planned(outcome="kept", seconds=0.1))
            assert counted.refused_hosts == len([each for each in said if each["event"] == "host_refused"])
            assert server.with_refused(counted).refused_hosts == 0, "each is told once"

    with structlog.testing.capture_logs() as said:
        run_async(main())
    errors = [each["error"] for each in said if each["event"] in {"host_refused", "planner_unreachable"}]
    assert len(errors) >= 2
    assert all(reason in error for error in errors)


async def test_an_order_is_obeyed_once_and_one_on_an_old_state_not_at_all(monkeypatch):
    async with one_host() as (connector, server, pool):
        await connector.add(A, by="x")
        assert len(pool.workers) == 2
        host = server.linked["b"]
        again = Order(number=99, state=host._state.number, change=Add(role=A, count=1, by="x", revision=0))
        host._channel.send(again)
        with pytest.raises(RequestError, match="has scaled meanwhile"):
            await host.add(A, by="x", revision=0)
        monkeypatch.setattr(host_link, "SILENT_S", -1.0)
        with pytest.raises(RequestError, match=r"an order on what the host told \d+ s ago"):
            await host.add(A, by="x")
        assert len(pool.workers) == 2


async def test_a_call_ends_with_its_connection_and_a_host_connects_again_by_itself():
    async with one_host() as (connector, server, pool):
        first = server.linked["b"]
        pool._make, make = None, pool._make  # its supervisor fails at the order, and lives on
        with pytest.raises(Exception, match="the supervisor failed at this order"):
            await connector.add(A, by="x")
        pool._make = make
        flip = asyncio.get_running_loop().create_task(first.flip("worker-1", Role.DECODE, by="x"))
        await asyncio.sleep(0)
        first._channel.abort("the cable is cut")
        with pytest.raises(Unavailable, match="the connection ended before it answered"):
            await flip
        assert "b: no answer" in (await connector.scale()).held
        await until(lambda: server.linked.get("b") not in {None, first})
        assert not (await connector.scale()).held
        await connector.add(A, by="x")
        assert len(pool.workers) == 2
