"""A planner's connector with two hosts, in virtual time: hosts that are lost, come back, and are scaled by others."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import Role
from penstock.deploy.hosts.connector import HostsConnector
from penstock.planner.actor import Actor, ActorConfig
from tests.support.linked_hosts import pool_of

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE


@asynccontextmanager
async def two_hosts(here, there, *, settle_s=0.0, rooms=(4, 4)):
    connector = HostsConnector(settle_s=settle_s, lost_after_s=15.0, hold_s=600.0)
    async with pool_of(here, rooms[0]) as a, pool_of(there, rooms[1]) as b:
        connector.join("a", a, await a.scale())
        connector.join("b", b, await b.scale())
        yield connector, a, b


def names(scale, role=A):
    return [replica.name for replica in scale.of(role)]


def room(scale, role=A):
    return next(limit.room for limit in scale.limits if limit.role is role)


@pytest.mark.virtual
async def test_workers_go_where_room_is_and_the_last_one_of_a_host_may_leave():
    async with two_hosts({A: 1}, {A: 1}, rooms=(2, 4)) as (connector, _, b):
        assert names(await connector.scale()) == ["worker-1@a", "worker-1@b"]
        assert room(await connector.scale()) == 4
        added = await connector.add(A, 3, by="x")
        assert sorted(added) == ["worker-2@a", "worker-2@b", "worker-3@b"]
        await asyncio.sleep(1)
        await connector.retire(["worker-1@b", "worker-2@b", "worker-3@b"], by="x")
        await asyncio.sleep(60)
        assert not b.workers
        await connector.retire(["worker-1@a"], by="x")
        await asyncio.sleep(60)
        with pytest.raises(RequestError, match="last worker that answers"):
            await connector.retire(["worker-2@a"], by="x")


@pytest.mark.virtual
async def test_nothing_changes_while_hosts_may_still_connect_to_a_planner_that_has_just_begun():
    async with two_hosts({A: 2}, {A: 1}, settle_s=15.0) as (connector, *_):
        scale = await connector.scale()
        assert room(scale) == 0
        assert "just begun" in scale.held
        with pytest.raises(RequestError, match="just begun"):
            await connector.add(A, by="x")
        with pytest.raises(RequestError, match="just begun"):
            await connector.retire(["worker-1@a"], by="x")
        await asyncio.sleep(15)
        assert not (await connector.scale()).held
        await connector.add(A, by="x")


@pytest.mark.virtual
async def test_a_lost_hosts_workers_count_for_a_while_and_nothing_is_taken_away_until_it_is_back():
    async with two_hosts({A: 2}, {A: 2}) as (connector, _, b):
        actor = Actor(connector, config=ActorConfig(hold_s=1.0))
        await actor.look()
        connector.leave("b", on_purpose=False)
        scale = await connector.scale()
        assert len(names(scale)) == 4
        assert room(scale) == 2
        with pytest.raises(RequestError, match="b: no answer"):
            await connector.retire(["worker-1@b"], by="x")
        outcome = await actor.carry_out({A: 3})
        assert not outcome.plan.retires
        assert "b: no answer" in outcome.refused[0]
        await asyncio.sleep(16)
        assert names(await connector.scale()) == ["worker-1@a", "worker-2@a"]
        outcome = await actor.carry_out({A: 3})
        assert outcome.plan.adds == {A: 1}, "what was lost is replaced elsewhere"
        await asyncio.sleep(1)
        assert not (await actor.carry_out({A: 1})).plan.retires
        connector.join("b", b, await b.scale())
        assert len(names(await connector.scale())) == 5
        assert len((await actor.carry_out({A: 1})).plan.retires) == 4
        assert len(names(await connector.scale())) == 1


@pytest.mark.virtual
async def test_a_host_that_stays_away_is_given_up_and_one_that_ends_on_purpose_holds_nothing():
    async with two_hosts({A: 2}, {A: 2}) as (connector, _, b):
        connector.leave("b", on_purpose=False)
        await asyncio.sleep(599)
        assert (await connector.scale()).held
        await asyncio.sleep(2)
        assert not (await connector.scale()).held
        connector.join("b", b, await b.scale())
        connector.leave("b", on_purpose=True)
        scale = await connector.scale()
        assert not scale.held
        assert names(scale) == ["worker-1@a", "worker-2@a"]


@pytest.mark.virtual
async def test_a_change_at_a_host_by_itself_is_adopted_and_a_host_that_comes_is_no_change():
    async with two_hosts({A: 1}, {A: 1}) as (connector, _, b):
        actor = Actor(connector)
        await actor.carry_out({A: 3})
        await asyncio.sleep(1)
        connector.leave("b", on_purpose=False)
        connector.join("b", b, await b.scale())
        assert not (await actor.carry_out({A: 3})).held
        before = (await connector.scale()).revision
        await b.add(A, by="a person")
        with pytest.raises(RequestError, match="a person at b has scaled"):
            await connector.add(A, by="planner", revision=before)
        assert "a person at b" in (await actor.carry_out({A: 1})).held


@pytest.mark.virtual
async def test_what_one_host_refuses_is_taken_back_at_the_others():
    async with two_hosts({A: 1}, {A: 1}, rooms=(3, 3)) as (connector, a, b):
        before = await connector.scale()
        b.hold("penstock apply")
        with pytest.raises(RequestError, match="penstock apply is under way"):
            await connector.add(A, 4, by="x")
        await asyncio.sleep(60)
        assert len(a.workers) == 1
        after = await connector.scale()
        assert (after.revision, after.changed_by) == (before.revision, before.changed_by)


class Host:
    """A host's pool, with another way to add workers."""

    def __init__(self, pool, add):
        self.pool, self._add = pool, add
        self.told = None
        """What it still tells of its scale, where its news are late."""

    def __getattr__(self, name):
        return getattr(self.pool, name)

    async def scale(self, after=None):
        return self.told or await self.pool.scale(after)

    async def add(self, *order, **named):
        return await self._add(self.pool, *order, **named)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.virtual
async def test_an_order_whose_answer_is_lost_is_the_planners_own_and_is_not_repeated(is_late):
    async def lost(pool, *order, **named):
        host.told = await pool.scale() if is_late else None
        await pool.add(*order, **named)
        raise Unavailable("b: the connection ended before it answered")

    async with two_hosts({A: 1}, {A: 1}, rooms=(1, 4)) as (connector, _, b):
        host = Host(b, lost)
        connector.join("b", host, await b.scale())
        actor = Actor(connector)
        outcome = await actor.carry_out({A: 3})
        assert "ended before it answered" in outcome.refused[0]
        assert len(b.workers) == 2
        host.told = None
        await actor.carry_out({A: 3})
        assert len(b.workers) == 2, "it is there; nothing is added again"
        look = await actor.look()
        assert (look.held, look.now) == ("", {A: 3})
        await b.add(A, by="somebody")
        assert "somebody at b has set 4 aggregated" in (await actor.look()).held


@pytest.mark.virtual
async def test_a_host_that_somebody_scales_between_look_and_order_refuses_the_order():
    async def overtaken(pool, *order, **named):
        await pool.add(A, by="a person")
        return await pool.add(*order, **named)

    async with two_hosts({A: 1}, {A: 1}, rooms=(1, 4)) as (connector, _, b):
        connector.join("b", Host(b, overtaken), await b.scale())
        with pytest.raises(RequestError, match="a person has scaled meanwhile"):
            await connector.add(A, by="planner")
        assert len(b.workers) == 2
        assert (await connector.scale()).changed_by == "a person at b"


@pytest.mark.virtual
async def test_flips_go_to_the_worker_s_host_and_may_take_its_last_one():
    async with two_hosts({P: 1, D: 1}, {P: 0, D: 1}) as (connector, *_):
        await connector.flip("decode-1@b", P, by="x")
        scale = await connector.scale()
        assert names(scale, P) == ["decode-1@b", "prefill-1@a"]
        with pytest.raises(RequestError, match="last worker that answers"):
            await connector.flip("decode-1@a", P, by="x")
