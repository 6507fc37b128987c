"""An actor on a deployment in memory, in virtual time."""

import asyncio
from itertools import pairwise

import msgspec
import pytest

from penstock.core.errors import RequestError
from penstock.core.types.instances import Role
from penstock.planner.actor import Actor, ActorConfig
from penstock.planner.memory_connector import MemoryConnector, TimedChanges

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE


@pytest.mark.virtual
async def test_another_worker_ends_where_one_may_not():
    class Adapted(MemoryConnector):
        async def retire(self, names, **values):
            if "aggregated-1" in names:
                raise RequestError("no other worker has adapter 'a'; retire another worker", http_status=409)
            await super().retire(names, **values)

    connector = Adapted({A: 3})
    actor = Actor(connector)
    outcome = await actor.carry_out({A: 2})
    assert "adapter 'a'" in outcome.refused[0]
    assert not (await actor.carry_out({A: 2})).refused
    assert await counts(connector) == {A: 2}
    assert [replica.name for replica in (await connector.scale()).of(A)] == ["aggregated-1", "aggregated-3"]


async def counts(connector):
    scale = await connector.scale()
    return {limit.role: len(scale.of(limit.role)) for limit in scale.limits}


@pytest.mark.virtual
async def test_targets_are_reached():
    connector = MemoryConnector({P: 1, D: 3})
    actor = Actor(connector)
    outcome = await actor.carry_out({P: 3, D: 2})
    assert [len(outcome.plan.flips), outcome.plan.adds, outcome.refused] == [1, {P: 1}, ()]
    assert await counts(connector) == {P: 3, D: 2}
    assert (await actor.carry_out({P: 3, D: 2})).plan.is_empty, "what starts counts"
    await asyncio.sleep(30)
    await actor.carry_out({P: 1, D: 1})
    assert await counts(connector) == {P: 1, D: 1}


@pytest.mark.virtual
async def test_a_persons_change_is_kept_for_a_while():
    connector = MemoryConnector({A: 2})
    actor = Actor(connector, config=ActorConfig(hold_s=100))
    await actor.carry_out({A: 3})
    await connector.add(A, 2, by="penstock scale")
    outcome = await actor.carry_out({A: 3})
    assert outcome.plan.is_empty
    assert outcome.held == "penstock scale has set 5 aggregated; the planner waits 100 s more"
    await asyncio.sleep(99)
    assert (await actor.carry_out({A: 3})).held
    assert await counts(connector) == {A: 5}
    await asyncio.sleep(2)
    assert not (await actor.carry_out({A: 3})).held
    assert await counts(connector) == {A: 3}


@pytest.mark.virtual
async def test_a_change_while_the_actor_acts_stops_it():
    class Meddled(MemoryConnector):
        async def flip(self, name, role, **values):
            await super().flip(name, role, **values)
            await self.add(D, by="somebody")

    connector = Meddled({P: 1, D: 3})
    actor = Actor(connector)
    outcome = await actor.carry_out({P: 4, D: 1})
    assert "somebody has scaled meanwhile" in outcome.refused[-1]
    assert await counts(connector) == {P: 2, D: 3}
    assert (await actor.carry_out({P: 4, D: 1})).held.startswith("somebody has set 2 prefill, 3 decode")


async def starts_of(actor, seconds, target):
    """Carry out a target every 5 s; returns the times at which workers were added, and all reasons for waits."""
    loop, added, waits = asyncio.get_running_loop(), [], []
    end_s = loop.time() + seconds
    while loop.time() < end_s:
        look = await actor.look()
        outcome = await actor.carry_out(target, look=look)
        added += [round(loop.time())] * sum(outcome.plan.adds.values())
        waits += outcome.waits
        await asyncio.sleep(5)
    return added, waits


@pytest.mark.virtual
async def test_starts_that_keep_failing_are_tried_later_each_time():
    connector = MemoryConnector({A: 1}, changes=TimedChanges(starts_s=1e9))
    config = ActorConfig(start_deadline_s=60, start_deadline_factor=0, start_wait_s_max=480)
    added, waits = await starts_of(Actor(connector, config=config), 3600, {A: 3})
    assert added[::2] == added[1::2], "both that lack are tried again together"
    gaps = [later - sooner for sooner, later in pairwise(added[::2])]
    assert gaps == [65, 125, 185, 305, 545, 545, 545, 545, 545]
    assert waits[0] == (
        "aggregated: 2 more wanted, tried again in 60 s, as 2 starts in a row were not done in time"
    )
    assert await counts(connector) in ({A: 1}, {A: 3}), "what did not start is gone"


@pytest.mark.virtual
async def test_a_silent_worker_is_replaced_after_the_deadline_and_one_that_speaks_again_stays():
    connector = MemoryConnector({A: 2})
    actor = Actor(connector, config=ActorConfig(start_deadline_s=60))
    for _ in range(12):
        look = await actor.look(silent=("aggregated-2", "frontend-1"))
        assert (look.now, look.overdue) == ({A: 2}, ())
        await asyncio.sleep(5)
    assert (await actor.look()).overdue == (), "it is heard"
    for _ in range(13):
        look = await actor.look(silent=("aggregated-2",))
        await asyncio.sleep(5)
    assert (look.now, look.overdue) == ({A: 1}, ("aggregated-2",))
    outcome = await actor.carry_out({A: 2}, look=look)
    assert (outcome.plan.adds, outcome.plan.retires) == ({A: 1}, ("aggregated-2",))


@pytest.mark.virtual
async def test_a_role_that_somebody_else_scales_is_left_alone():
    class Owned(MemoryConnector):
        async def scale(self, after=None):
            scale = await super().scale(after)
            limits = tuple(
                msgspec.structs.replace(limit, owner="hpa chat" if limit.role is D else "")
                for limit in scale.limits
            )
            return msgspec.structs.replace(scale, limits=limits)

    connector = Owned({P: 2, D: 2})
    outcome = await Actor(connector).carry_out({P: 1, D: 4})
    assert outcome.refused == ("decode: 4 are wanted and 2 are there: hpa chat decides",)
    assert await counts(connector) == {P: 1, D: 2}, "no prefill worker becomes one for decode"
    assert not (await Actor(connector).carry_out({P: 1, D: 2})).refused


@pytest.mark.virtual
async def test_while_a_deployment_is_held_workers_are_added_and_none_leaves_or_flips():
    class Held(MemoryConnector):
        async def scale(self, after=None):
            return msgspec.structs.replace(await super().scale(after), held="b: no answer")

    connector = Held({P: 3, D: 1})
    outcome = await Actor(connector).carry_out({P: 1, D: 2})
    assert outcome.refused == ("b: no answer",)
    assert await counts(connector) == {P: 3, D: 2}


class Rigid(MemoryConnector):
    """Workers that take no other role: they refuse it, or fail once they have begun."""

    begins = False

    async def flip(self, name, role, **settings):
        if self.begins:
            await super().flip(name, role, **settings)
        raise RequestError("transfers no KV", http_status=409)


@pytest.mark.parametrize(("begins", "seconds"), [(False, 30), (True, 600)])
@pytest.mark.virtual
async def test_a_refused_flip_is_tried_again_soon_and_one_that_failed_once_begun_later(begins, seconds):
    connector = Rigid({P: 1, D: 2})
    connector.begins = begins
    actor = Actor(connector)
    await actor.carry_out({P: 2, D: 1})
    await asyncio.sleep(seconds - 1)
    assert actor.rigid == ((D, P),)
    await asyncio.sleep(2)
    assert actor.rigid == ()
