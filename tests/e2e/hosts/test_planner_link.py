"""Connections of hosts to the planner: what is refused, said at both ends, and obeyed once."""

import asyncio
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
import structlog

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import Role
from penstock.deploy.hosts import host_link
from penstock.deploy.hosts.connector import HostsConnector
from penstock.deploy.hosts.planner_server import PlannerServer
from penstock.deploy.messages import RoundCounts
from penstock.planner.observation import ObservationStream
from tests.support.linked_hosts import identity, link, pool_of
from tests.support.until import until

A = Role.AGGREGATED


class Cable:
    """Carries the connections of a host to the planner, until it is cut."""

    def __init__(self, server):
        self._server = server
        self._writers = []

    async def __aenter__(self):
        self._listener = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._listener.close()
        self.cut()

    def cut(self, *, for_good=False):
        """End the connections without a word; unless for good, new ones are carried."""
        if for_good:
            self._listener.close()
        while self._writers:
            self._writers.pop().transport.abort()

    async def _carry(self, reader, writer):
        address = self._server.address
        there, back = await asyncio.open_connection(address.host, address.port)
        self._writers += [writer, back]
        with suppress(OSError):
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()


@asynccontextmanager
async def one_host(host=None, *, seen=None, **settings):
    """Connect a host of one worker by a cable, or what stands for it; gives all parts."""
    connector = HostsConnector(settle_s=0.0, **settings)
    seen = seen or ObservationStream()
    async with (
        pool_of({A: 1}, 8) as pool,
        PlannerServer("tcp://127.0.0.1:0", identity(), connector, seen, own_name="a") as server,
        Cable(server) as cable,
        link(cable, "b", host(pool) if host else pool) as there,
    ):
        await until(lambda: "b" in server.linked)
        yield SimpleNamespace(
            connector=connector, seen=seen, server=server, pool=pool, cable=cable, link=there
        )


@pytest.mark.parametrize(
    ("name", "secret", "reason"),
    [
        ("c", b"a guess of a stranger", "deployment secret"),
        ("b", None, "b is connected already"),
        ("a", None, "a is connected already"),
        ("x@y", None, "must be a printable name"),
    ],
)
async def test_who_is_refused_hears_why_at_both_ends_and_is_not_scaled(name, secret, reason):
    with structlog.testing.capture_logs() as said:
        async with one_host() as there, pool_of({A: 1}) as other:
            server = there.server
            async with link(server, name, other, **({} if secret is None else {"secret": secret})):
                await until(lambda: {"host_refused", "planner_unreachable"} <= {e["event"] for e in said})
            assert set(server.linked) == {"b"}
            counted = server.with_refused(RoundCounts(outcome="kept", seconds=0.1))
            assert counted.refused_hosts == len([each for each in said if each["event"] == "host_refused"])
            assert server.with_refused(counted).refused_hosts == 0, "each is told once"
    errors = [each["error"] for each in said if each["event"] in {"host_refused", "planner_unreachable"}]
    assert len(errors) >= 2
    assert all(reason in error for error in errors)


async def test_of_two_orders_on_one_scale_one_is_obeyed_and_one_on_old_news_not_at_all(monkeypatch):
    async with one_host() as there:
        host = there.server.linked["b"]
        orders = (host.add(A, by="x", revision=0), host.add(A, by="x", revision=0))
        obeyed, refused = await asyncio.gather(*orders, return_exceptions=True)
        assert obeyed == ("worker-2",)
        assert "has scaled meanwhile" in str(refused)
        monkeypatch.setattr(host_link, "SILENT_S", -1.0)
        with pytest.raises(RequestError, match=r"an order on what the host told \d+ s ago"):
            await host.add(A, by="x")
        assert len(there.pool.workers) == 2


class Failing:
    """A host whose supervisor fails at its first order to add, and lives on."""

    def __init__(self, pool):
        self._pool, self._has_failed = pool, False

    def __getattr__(self, name):
        return getattr(self._pool, name)

    async def add(self, *order, **named):
        if not self._has_failed:
            self._has_failed = True
            raise ZeroDivisionError
        return await self._pool.add(*order, **named)


async def test_a_call_ends_with_its_connection_and_a_host_connects_again_by_itself():
    async with one_host(Failing) as there:
        connector, server = there.connector, there.server
        first = server.linked["b"]
        with pytest.raises(Exception, match="the supervisor failed at this order"):
            await connector.add(A, by="x")
        flip = asyncio.create_task(first.flip("worker-1", Role.DECODE, by="x"))
        await asyncio.sleep(0)
        there.cable.cut()
        with pytest.raises(Unavailable, match="the connection ended before it answered"):
            await flip
        assert "b: no answer" in (await connector.scale()).held
        await until(lambda: server.linked.get("b") not in {None, first})
        assert not (await connector.scale()).held
        await connector.add(A, by="x")
        assert len(there.pool.workers) == 2
