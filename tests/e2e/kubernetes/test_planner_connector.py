"""A planner's connector by PenstockRoles: others who scale, an API server that is away, pods that are lost or chosen to end."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import Role
from penstock.core.types.scaling import ReplicaState
from penstock.deploy.hosts.kubernetes_connector import KubernetesConnector
from penstock.deploy.hosts.planner_server import PlannerServer
from penstock.deploy.hosts.roles import ROLES
from penstock.planner.act.actor import Actor
from penstock.planner.observe.stream import ObservationStream
from tests.support.coroutines import real
from tests.support.kubernetes.resources import Object
from tests.support.linked_hosts import identity, link
from tests.support.pods_of_roles import GRAPH, pods_of_roles

A = Role.AGGREGATED
NAME = f"{GRAPH}-{A}"


async def until(holds):
    while not (found := await holds()):  # noqa: ASYNC110 - the test's time limit bounds it
        await asyncio.sleep(0.01)
    return found


async def ready(pods):
    scale = await pods.connector.scale()
    return {each.name for each in scale.of(A) if each.state is ReplicaState.READY}


def pod_of(pods, name):
    return next(slot.pod for slot in pods.connector._roles[A].slots if slot.name == name)


async def is_ready(pods, count):
    return len(await ready(pods)) == count


@real
async def test_the_pod_that_the_planner_chose_ends_and_its_name_is_written_with_the_number():
    async def pods_are(pods, names):
        return {each.name for each in (await pods.connector.scale()).replicas} == names

    async with pods_of_roles({A: 3}) as pods:
        (chosen,) = [pod_of(pods, "aggregated-2")]
        await pods.connector.retire(["aggregated-2"], by="planner")
        spec = (await pods.client.get(ROLES, NAME))["spec"]
        assert (spec["replicas"], spec["leaving"]) == (2, [chosen])
        await until(lambda: pods_are(pods, {"aggregated-1", "aggregated-3"}))
        assert chosen not in pods.pods[A]
        await pods.connector.add(A, by="planner")
        assert (await pods.client.get(ROLES, NAME))["spec"]["leaving"] == [], "who is gone is not named again"


@real
async def test_a_role_of_an_autoscaler_is_shown_and_not_scaled():
    async with pods_of_roles({A: 2}) as pods:
        await pods.client.patch(ROLES, NAME, {"status": {"scaledBy": "keda-hpa-chat"}}, "status")
        scale = await pods.connector.scale()
        assert [(limit.owner, limit.room) for limit in scale.limits] == [("keda-hpa-chat", 0)]
        with pytest.raises(RequestError, match="keda-hpa-chat decides"):
            await pods.connector.add(A, by="planner")
        with pytest.raises(RequestError, match="keda-hpa-chat decides"):
            await pods.connector.retire(["aggregated-1"], by="planner")
        outcome = await Actor(pods.connector).carry_out({A: 4})
        assert outcome.refused == ("aggregated: 4 are wanted and 2 are there: keda-hpa-chat decides",)
        assert (await pods.client.get(ROLES, NAME))["spec"]["replicas"] == 2


@real
async def test_a_persons_number_is_adopted_and_an_order_on_an_old_one_refused():
    async with pods_of_roles({A: 1}) as pods:
        actor = Actor(pods.connector)
        before = (await actor.look()).scale.revision
        await pods.client.patch(ROLES, NAME, {"spec": {"replicas": 3}}, "scale")
        with pytest.raises(RequestError, match="has scaled meanwhile"):
            await pods.connector.add(A, by="planner", revision=before)
        assert "has set" in (await actor.carry_out({A: 1})).held
        await until(lambda: is_ready(pods, 3))


@real
async def test_an_api_server_that_is_away_scales_nothing_and_a_status_is_no_conflict():
    async with pods_of_roles({A: 1}) as pods:
        read = pods.client.get

        async def changed_since(resource, name, subresource=""):
            body: Object = await read(resource, name, subresource)
            await pods.client.patch(ROLES, NAME, {"status": {"readyReplicas": 9}}, "status")
            return body

        pods.client.get = changed_since
        await pods.connector.add(A, by="planner")

        async def away(resource, name, subresource=""):
            raise Unavailable("the API server does not answer")

        pods.client.get = away
        for call in (
            pods.connector.scale(),
            pods.connector.add(A, by="x"),
            pods.connector.retire([], by="x"),
        ):
            with pytest.raises(Unavailable, match="does not answer"):
                await call
        pods.client.get = read
        assert (await read(ROLES, NAME))["spec"]["replicas"] == 2


@real
async def test_a_lost_pod_counts_for_a_while_and_its_worker_then_waits_for_another_pod():
    async def only_second(pods):
        return await ready(pods) == {"aggregated-2"}

    async with pods_of_roles({A: 2}, lost_after_s=60.0) as pods:
        lost = pod_of(pods, "aggregated-1")
        host = pods.connector._pods[lost].host
        pods.connector.leave(lost, on_purpose=False)
        scale = await pods.connector.scale()
        assert len(await ready(pods)) == 2
        assert "a pod was lost" in scale.held
        with pytest.raises(RequestError, match="a pod was lost"):
            await pods.connector.retire(["aggregated-2"], by="planner")
        pods.connector._lost_after_s = 0.0
        await until(lambda: only_second(pods))
        (waiting,) = [each for each in (await pods.connector.scale()).replicas if each.name == "aggregated-1"]
        assert (waiting.state, waiting.phase) == (ReplicaState.STARTING, "waits for its pod")
        pods.connector.join("another-pod", host, await host.scale())
        assert await ready(pods) == {"aggregated-1", "aggregated-2"}
        assert (await pods.client.get(ROLES, NAME))["spec"]["replicas"] == 2


@real
async def test_a_planner_that_starts_again_takes_no_second_worker_away():
    async with pods_of_roles({A: 3}) as pods:
        second = KubernetesConnector(pods.client, GRAPH, [A], settle_s=0.0)
        for name, pod in pods.connector._pods.items():
            second.join(name, pod.host, await pod.host.scale())
        chosen = pod_of(pods, "aggregated-3")
        pods.pods[A].pop(chosen)  # it is slow to end
        await pods.connector.retire(["aggregated-3"], by="planner")
        scale = await second.scale()
        assert len(scale.of(A)) == 2
        assert [each.state for each in scale.replicas].count(ReplicaState.DRAINING) == 1
        assert not (await Actor(second).carry_out({A: 2})).plan.retires


@real
async def test_of_a_stateful_set_the_last_pods_end():
    async with pods_of_roles({A: 1}) as pods:
        pods.is_stateful = True
        (old,) = pods.pods[A]
        await pods.connector.add(A, 2, by="planner")
        await until(lambda: is_ready(pods, 3))
        slots = {slot.pod: slot.name for slot in pods.connector._roles[A].slots}
        first, last = slots[f"{GRAPH}-{A}-1"], slots[f"{GRAPH}-{A}-2"]
        await pods.connector.retire([first], by="planner")
        assert await ready(pods) == {slots[old], first}
        assert last not in await ready(pods)


@real
async def test_a_number_that_is_set_between_look_and_write_stays():
    async with pods_of_roles({A: 1}) as pods:
        read = pods.client.get

        async def overtaken(resource, name, subresource=""):
            body: Object = await read(resource, name, subresource)
            if body["spec"]["replicas"] == 1:
                await pods.client.patch(ROLES, NAME, {"spec": {"replicas": 5}}, "scale")
            return body

        pods.client.get = overtaken
        with pytest.raises(RequestError, match="aggregated: not scaled"):
            await pods.connector.add(A, by="planner")
        assert (await read(ROLES, NAME))["spec"]["replicas"] == 5


@asynccontextmanager
async def surge_pod(pods, name=f"{GRAPH}-{A}-y-0"):
    """Have one pod more than wanted, as a roll-out has."""
    ends = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(pods._run_pod(A, name, ends))
        await until(lambda: joined(pods, name))
        yield ends
        ends.set()


async def joined(pods, name):
    return name in pods.connector._pods


@real
async def test_the_new_pod_of_a_roll_out_is_not_one_too_many():
    async with pods_of_roles({A: 2}) as pods, surge_pod(pods) as ends:
        scale = await pods.connector.scale()
        assert len(scale.of(A)) == 2
        assert "more pods than are wanted" in next(
            each.phase for each in scale.replicas if each.state is ReplicaState.DRAINING
        )
        outcome = await Actor(pods.connector).carry_out({A: 2})
        assert outcome.plan.is_empty
        assert (await pods.client.get(ROLES, NAME))["spec"]["replicas"] == 2
        await pods.connector.retire([min(await ready(pods))], by="planner")
        assert (await pods.client.get(ROLES, NAME))["spec"]["replicas"] == 1
        ends.set()
        await until(lambda: is_ready(pods, 1))


@real
async def test_the_last_worker_that_serves_stays_where_a_stateful_set_would_end_it():
    async with pods_of_roles({A: 1}) as pods:
        connector = KubernetesConnector(pods.client, GRAPH, [A], settle_s=0.0)
        await pods.client.patch(ROLES, NAME, {"spec": {"replicas": 2}})
        (pod,) = pods.connector._pods.values()
        connector.join(f"{GRAPH}-{A}-1", pod.host, await pod.host.scale())
        scale = await connector.scale()
        states = {each.name: each.state for each in scale.replicas}
        assert states == {"aggregated-1": ReplicaState.READY, "aggregated-2": ReplicaState.STARTING}
        with pytest.raises(RequestError, match="aggregated-1 is the last worker"):
            await connector.retire(["aggregated-2"], by="planner")


@real
async def test_of_a_stateful_set_the_last_pod_ends_also_while_it_starts_or_drains():
    async with pods_of_roles({A: 1}) as pods:
        connector = KubernetesConnector(pods.client, GRAPH, [A], settle_s=0.0)
        (pod,) = pods.connector._pods.values()
        await pods.client.patch(ROLES, NAME, {"spec": {"replicas": 4}})
        for number in (0, 1, 2):  # the fourth has not come yet
            connector.join(f"{GRAPH}-{A}-{number}", pod.host, await pod.host.scale())
        await connector.scale()
        await connector.retire(["aggregated-1"], by="planner")
        slots = {slot.name: slot for slot in connector._roles[A].slots}
        assert sorted(slots) == ["aggregated-1", "aggregated-2", "aggregated-3"]
        await connector.retire(["aggregated-1"], by="planner")
        assert [name for name, slot in slots.items() if slot.is_leaving] == ["aggregated-3"]


@real
async def test_a_pod_that_was_to_end_and_stayed_is_not_named_with_the_next_one():
    async with pods_of_roles({A: 3}) as pods:
        next_one = pod_of(pods, "aggregated-2")
        pods.is_paused = True
        await pods.connector.retire(["aggregated-1"], by="planner")
        await pods.client.patch(ROLES, NAME, {"spec": {"replicas": 3}}, "scale")
        assert await ready(pods) == {"aggregated-1", "aggregated-2", "aggregated-3"}
        pods.is_paused = False
        await pods.connector.retire(["aggregated-2"], by="planner")
        assert (await pods.client.get(ROLES, NAME))["spec"]["leaving"] == [next_one]
        await until(lambda: is_ready(pods, 2))
        assert await ready(pods) == {"aggregated-1", "aggregated-3"}


@real
async def test_a_change_whose_answer_is_lost_is_the_planners_own():
    async with pods_of_roles({A: 1}) as pods:
        actor = Actor(pods.connector)
        await actor.look()
        patch, read = pods.client.patch, pods.client.get

        async def lost(*args):
            await patch(*args)
            pods.client.get = away  # and the server is away for a moment
            raise Unavailable("no answer")

        async def away(*args):
            raise Unavailable("no answer")

        pods.client.patch = lost
        with pytest.raises(Unavailable):
            await actor.carry_out({A: 2})
        pods.client.patch, pods.client.get = patch, read
        look = await actor.look()
        assert look.held == ""
        assert look.scale.changed_by == "planner"
        assert look.now == {A: 2}
        await pods.client.patch(ROLES, NAME, {"spec": {"replicas": 3}}, "scale")
        assert "has set 3 aggregated" in (await actor.look()).held


@real
async def test_a_change_that_did_not_come_about_hides_nobody_elses():
    async with pods_of_roles({A: 1}) as pods:
        actor = Actor(pods.connector)
        await actor.look()
        patch = pods.client.patch

        async def lost(*args):
            raise Unavailable("no answer")

        pods.client.patch = lost
        assert (await actor.carry_out({A: 2})).refused == ("no answer",)
        await patch(ROLES, NAME, {"spec": {"replicas": 3}}, "scale")
        assert "has set 3 aggregated" in (await actor.look()).held


@pytest.mark.parametrize("owned", [Role.PREFILL, Role.DECODE])
@real
async def test_no_worker_changes_to_or_from_a_role_of_an_autoscaler(owned):
    async with pods_of_roles({Role.PREFILL: 2, Role.DECODE: 2}) as pods:
        await pods.client.patch(
            ROLES, f"{GRAPH}-{owned}", {"status": {"scaledBy": "keda-hpa-chat"}}, "status"
        )
        with pytest.raises(RequestError, match=f"{owned}: keda-hpa-chat decides"):
            await pods.connector.flip("prefill-1", Role.DECODE, by="somebody")


@real
async def test_a_worker_that_was_heard_before_it_had_its_name_is_one_source_and_ends_as_one():
    async def sources(seen, *names):
        return seen.observe(10).silent == names

    async with pods_of_roles({A: 1}) as pods:
        seen = ObservationStream(silent_after_s=0.0)
        async with PlannerServer("tcp://127.0.0.1:0", identity(), pods.connector, seen) as server:
            (pod,) = pods.connector._pods.values()
            pods.is_paused = True
            await pods.client.patch(ROLES, NAME, {"spec": {"replicas": 2}})
            of_worker = link(server, f"{GRAPH}-{A}-z-1", pod.host)
            of_worker.frontends = tuple
            async with of_worker:
                await until(lambda: sources(seen, f"worker-1@{GRAPH}-{A}-z-1"))
                await until(lambda: is_ready(pods, 2))
                await until(lambda: sources(seen, "aggregated-2"))
            await until(lambda: sources(seen))
