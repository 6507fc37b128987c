"""A planner's connector by PenstockRoles: others who scale, an API server that is away, pods that are lost or chosen to end."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import ReplicaState, Role
from penstock.deploy.hosts.kubernetes_connector import ROLES, KubernetesConnector
from penstock.deploy.hosts.planner_server import PlannerServer
from penstock.planner.actor import Actor
from penstock.planner.observation import ObservationStream
from tests.support.linked_hosts import identity, link
from tests.support.pods_of_roles import GRAPH, pods_of_roles

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE
NAME = f"{GRAPH}-{A}"
FIRST, SECOND, THIRD = (f"aggregated-{number}" for number in (1, 2, 3))


async def until(holds):
    while not (found := await holds()):  # noqa: ASYNC110 - the test's time limit bounds it
        await asyncio.sleep(0.01)
    return found


async def ready(pods):
    scale = await pods.connector.scale()
    return {each.name for each in scale.of(A) if each.state is ReplicaState.READY}


async def until_ready(pods, *names):
    async def holds():
        return await ready(pods) == set(names)

    await until(holds)


async def spec_of(pods):
    return (await pods.client.get(ROLES, NAME))["spec"]


async def set_number(pods, replicas):
    await pods.client.patch(ROLES, NAME, {"spec": {"replicas": replicas}}, "scale")


def another_connector(pods):
    return KubernetesConnector(pods.client, GRAPH, [A], settle_s=0.0)


async def test_the_pod_that_the_planner_chose_ends_and_its_name_is_written_with_the_number():
    async with pods_of_roles({A: 3}) as pods:
        chosen = pods.pod_of(A, SECOND)
        await pods.connector.retire([SECOND], by="planner")
        spec = await spec_of(pods)
        assert (spec["replicas"], spec["leaving"]) == (2, [chosen])

        async def has_ended():
            return {each.name for each in (await pods.connector.scale()).replicas} == {FIRST, THIRD}

        await until(has_ended)
        assert chosen not in pods.pods[A]
        await pods.connector.add(A, by="planner")
        assert (await spec_of(pods))["leaving"] == [], "who is gone is not named again"


@pytest.mark.parametrize("owned", [P, D])
async def test_a_role_of_an_autoscaler_is_shown_and_not_scaled(owned):
    async with pods_of_roles({P: 2, D: 2}) as pods:
        status = {"status": {"scaledBy": "keda-hpa-chat"}}
        await pods.client.patch(ROLES, f"{GRAPH}-{owned}", status, "status")
        scale = await pods.connector.scale()
        (limit,) = (limit for limit in scale.limits if limit.role is owned)
        assert (limit.owner, limit.room) == ("keda-hpa-chat", 0)
        for change in (
            pods.connector.add(owned, by="planner"),
            pods.connector.retire([f"{owned}-1"], by="planner"),
            pods.connector.flip("prefill-1", D, by="somebody"),
        ):
            with pytest.raises(RequestError, match="keda-hpa-chat decides"):
                await change
        outcome = await Actor(pods.connector).carry_out({P: 2, D: 2} | {owned: 4})
        assert outcome.refused == (f"{owned}: 4 are wanted and 2 are there: keda-hpa-chat decides",)


async def test_a_persons_number_is_adopted_and_an_order_on_an_old_one_refused():
    async with pods_of_roles({A: 1}) as pods:
        actor = Actor(pods.connector)
        before = (await actor.look()).scale.revision
        await set_number(pods, 3)
        with pytest.raises(RequestError, match="has scaled meanwhile"):
            await pods.connector.add(A, by="planner", revision=before)
        assert "has set" in (await actor.carry_out({A: 1})).held
        await until_ready(pods, FIRST, SECOND, THIRD)


async def test_an_api_server_that_is_away_scales_nothing_and_a_status_is_no_conflict():
    async with pods_of_roles({A: 1}) as pods:
        read = pods.client.get

        async def changed_since(*words):
            body = await read(*words)
            await pods.client.patch(ROLES, NAME, {"status": {"readyReplicas": 9}}, "status")
            return body

        pods.client.get = changed_since
        await pods.connector.add(A, by="planner")
        pods.client.get = away
        for call in (
            pods.connector.scale(),
            pods.connector.add(A, by="x"),
            pods.connector.retire([], by="x"),
        ):
            with pytest.raises(Unavailable, match="no answer"):
                await call
        pods.client.get = read
        assert (await spec_of(pods))["replicas"] == 2


async def away(*_words):
    raise Unavailable("no answer")


async def test_a_number_that_is_set_between_look_and_write_stays():
    async with pods_of_roles({A: 1}) as pods:
        read = pods.client.get

        async def overtaken(*words):
            body = await read(*words)
            if body["spec"]["replicas"] == 1:
                await set_number(pods, 5)
            return body

        pods.client.get = overtaken
        with pytest.raises(RequestError, match="aggregated: not scaled"):
            await pods.connector.add(A, by="planner")
        pods.client.get = read
        assert (await spec_of(pods))["replicas"] == 5


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_change_whose_answer_is_lost_is_the_planners_own_if_it_came_about(is_done):
    async with pods_of_roles({A: 1}) as pods:
        actor = Actor(pods.connector)
        await actor.look()
        patch, read = pods.client.patch, pods.client.get

        async def lost(*words):
            if is_done:
                await patch(*words)
                pods.client.get = away  # and the server is away for a moment
            raise Unavailable("no answer")

        pods.client.patch = lost
        if is_done:
            with pytest.raises(Unavailable):
                await actor.carry_out({A: 2})
        else:
            assert (await actor.carry_out({A: 2})).refused == ("no answer",)
        pods.client.patch, pods.client.get = patch, read
        if is_done:
            look = await actor.look()
            assert (look.held, look.scale.changed_by, look.now) == ("", "planner", {A: 2})
        await set_number(pods, 3)
        assert "has set 3 aggregated" in (await actor.look()).held


async def test_a_lost_pod_counts_for_a_while_and_its_worker_then_waits_for_another_pod():
    async with pods_of_roles({A: 2}, lost_after_s=2.0) as pods:
        lost = pods.pod_of(A, FIRST)
        pods.connector.leave(lost, on_purpose=False)
        scale = await pods.connector.scale()
        assert len(await ready(pods)) == 2
        assert "a pod was lost" in scale.held
        with pytest.raises(RequestError, match="a pod was lost"):
            await pods.connector.retire([SECOND], by="planner")
        await until_ready(pods, SECOND)
        (waiting,) = [each for each in (await pods.connector.scale()).replicas if each.name == FIRST]
        assert (waiting.state, waiting.phase) == (ReplicaState.STARTING, "waits for its pod")
        host = pods.hosts[lost]
        pods.connector.join("another-pod", host, await host.scale())
        assert await ready(pods) == {FIRST, SECOND}
        assert (await spec_of(pods))["replicas"] == 2


async def test_a_planner_that_starts_again_takes_no_second_worker_away():
    async with pods_of_roles({A: 3}) as pods:
        second = another_connector(pods)
        for name in pods.pods[A]:
            second.join(name, pods.hosts[name], await pods.hosts[name].scale())
        pods.pods[A].pop(pods.pod_of(A, THIRD))  # it is slow to end
        await pods.connector.retire([THIRD], by="planner")
        scale = await second.scale()
        assert len(scale.of(A)) == 2
        assert [each.state for each in scale.replicas].count(ReplicaState.DRAINING) == 1
        assert not (await Actor(second).carry_out({A: 2})).plan.retires


async def test_of_a_stateful_set_the_last_pods_end_also_while_they_start_or_drain():
    async with pods_of_roles({A: 1}) as pods:
        (host,) = pods.hosts.values()

        async def connected(replicas, *numbers):
            await set_number(pods, replicas)
            connector = another_connector(pods)
            for number in numbers:
                connector.join(f"{NAME}-{number}", host, await host.scale())
            return connector, {each.name: each.state for each in (await connector.scale()).replicas}

        connector, states = await connected(2, 1)
        assert states == {FIRST: ReplicaState.READY, SECOND: ReplicaState.STARTING}
        with pytest.raises(RequestError, match="aggregated-1 is the last worker"):
            await connector.retire([SECOND], by="planner")
        connector, _ = await connected(4, 0, 1, 2)  # the fourth has not come yet
        await connector.retire([FIRST], by="planner")
        assert {each.name for each in (await connector.scale()).replicas} == {FIRST, SECOND, THIRD}
        await connector.retire([FIRST], by="planner")
        states = {each.name: each.state for each in (await connector.scale()).replicas}
        assert states[THIRD] is ReplicaState.DRAINING
        assert states[FIRST] is states[SECOND] is ReplicaState.READY


@asynccontextmanager
async def surge_pod(pods):
    """Have one pod more than wanted, as a roll-out has."""
    name, ends = f"{NAME}-y-0", asyncio.Event()

    async def joined():
        return name in pods.hosts

    async with asyncio.TaskGroup() as group:
        group.create_task(pods.run_pod(A, name, ends))
        await until(joined)
        yield ends
        ends.set()


async def test_the_new_pod_of_a_roll_out_is_not_one_too_many():
    async with pods_of_roles({A: 2}) as pods, surge_pod(pods) as ends:
        scale = await pods.connector.scale()
        assert len(scale.of(A)) == 2
        (draining,) = (each for each in scale.replicas if each.state is ReplicaState.DRAINING)
        assert "more pods than are wanted" in draining.phase
        outcome = await Actor(pods.connector).carry_out({A: 2})
        assert outcome.plan.is_empty
        assert (await spec_of(pods))["replicas"] == 2
        await pods.connector.retire([min(await ready(pods))], by="planner")
        assert (await spec_of(pods))["replicas"] == 1
        ends.set()

        async def one_is_ready():
            return len(await ready(pods)) == 1

        await until(one_is_ready)


async def test_a_pod_that_was_to_end_and_stayed_is_not_named_with_the_next_one():
    async with pods_of_roles({A: 3}) as pods:
        next_one = pods.pod_of(A, SECOND)
        pods.is_paused = True
        await pods.connector.retire([FIRST], by="planner")
        await set_number(pods, 3)
        assert await ready(pods) == {FIRST, SECOND, THIRD}
        pods.is_paused = False
        await pods.connector.retire([SECOND], by="planner")
        assert (await spec_of(pods))["leaving"] == [next_one]
        await until_ready(pods, FIRST, THIRD)


async def test_a_worker_that_was_heard_before_it_had_its_name_is_one_source_and_ends_as_one():
    async with pods_of_roles({A: 1}) as pods:
        seen = ObservationStream(silent_after_s=0.0)

        async def until_heard(*names):
            async def holds():
                return seen.observe(10).silent == names

            await until(holds)

        async with PlannerServer("tcp://127.0.0.1:0", identity(), pods.connector, seen) as server:
            (host,) = pods.hosts.values()
            pods.is_paused = True
            await pods.client.patch(ROLES, NAME, {"spec": {"replicas": 2}})
            of_worker = link(server, f"{NAME}-z-1", host)
            of_worker.frontends = tuple
            async with of_worker:
                await until_heard(f"worker-1@{NAME}-z-1")
                await until_ready(pods, FIRST, SECOND)
                await until_heard(SECOND)
            await until_heard()
