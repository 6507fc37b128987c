"""The conformance suite of scaling connectors. Subclass it and name a harness.

    class TestMyConnector(ScalingConnectorSuite):
        def make(self, replicas):
            return my_harness(replicas)  # an async context manager that gives the connector

A connector's deployment has the roles that `replicas` names, with so many ready workers each, and room for a few more. Workers have
any names.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager

import pytest

from penstock.core.errors import RequestError
from penstock.core.types.instances import Replica, ReplicaState, Role, Scale
from penstock.seams import ScalingConnector
from penstock.testing.loop import run_async

_PAIR = {Role.PREFILL: 1, Role.DECODE: 2}
_ALONE = {Role.AGGREGATED: 1}


class ScalingConnectorSuite:
    """What every connector keeps."""

    loop_factory: Callable[[], asyncio.AbstractEventLoop] = staticmethod(asyncio.new_event_loop)

    def make(self, replicas: Mapping[Role, int]) -> AbstractAsyncContextManager[ScalingConnector]:
        """Make a deployment whose workers are ready once the context is entered."""
        raise NotImplementedError

    def test_added_workers_start_and_become_ready(self) -> None:
        async def check(connector: ScalingConnector) -> None:
            before = await connector.scale()
            names = await connector.add(Role.AGGREGATED, 2, by="suite")
            assert len(set(names)) == 2
            assert not set(names) & {replica.name for replica in before.replicas}
            scale = await connector.scale()
            assert {_replica(scale, name).role for name in names} == {Role.AGGREGATED}
            assert scale.revision == before.revision + 1
            assert scale.changed_by == "suite"
            assert scale.sequence > before.sequence
            await _until(connector, lambda scale: all(_state(scale, name) is READY for name in names))

        self._run(_ALONE, check)

    def test_a_retired_worker_drains_and_is_gone(self) -> None:
        async def check(connector: ScalingConnector) -> None:
            first, second = await _names(connector, Role.DECODE)
            await connector.retire([second], by="suite")
            assert [replica.name for replica in (await connector.scale()).of(Role.DECODE)] == [first]
            await _until(connector, lambda scale: len(scale.replicas) == 2)
            (name,) = await connector.add(Role.DECODE, by="suite")
            await _until(connector, lambda scale: _state(scale, name) is READY)

        self._run(_PAIR, check)

    def test_a_worker_may_be_retired_before_it_is_ready(self) -> None:
        async def check(connector: ScalingConnector) -> None:
            (name,) = await connector.add(Role.AGGREGATED, by="suite")
            await connector.retire([name], by="suite")
            await _until(connector, lambda scale: len(scale.replicas) == 1)

        self._run(_ALONE, check)

    def test_a_flipped_worker_keeps_its_name(self) -> None:
        async def check(connector: ScalingConnector) -> None:
            _, name = await _names(connector, Role.DECODE)
            await connector.flip(name, Role.PREFILL, by="suite")
            scale = await connector.scale()
            assert _replica(scale, name).role is Role.PREFILL
            assert _state(scale, name) is READY
            await connector.flip(name, Role.DECODE, by="suite")
            assert len((await connector.scale()).of(Role.DECODE)) == 2

        self._run(_PAIR, check)

    def test_the_last_worker_that_answers_stays(self) -> None:
        async def check(connector: ScalingConnector) -> None:
            first, second = await _names(connector, Role.DECODE)
            (prefill,) = await _names(connector, Role.PREFILL)
            for attempt in (
                connector.retire([first, second], by="suite"),
                connector.retire([first, second, prefill], by="suite"),
            ):
                await _refused(attempt, 409)
            await connector.retire([first], by="suite")
            await _refused(connector.retire([second], by="suite"), 409)
            await _refused(connector.flip(second, Role.PREFILL, by="suite"), 409)
            await connector.retire([prefill], by="suite")
            assert len((await connector.scale()).of(Role.DECODE)) == 1

        self._run(_PAIR, check)

    def test_what_cannot_be_is_refused_and_changes_nothing(self) -> None:
        async def check(connector: ScalingConnector) -> None:
            before = await connector.scale()
            name, _ = await _names(connector, Role.DECODE)
            await _refused(connector.add(Role.AGGREGATED, by="suite"), 404)
            await _refused(connector.add(Role.DECODE, 0, by="suite"), 400)
            await _refused(connector.add(Role.DECODE, 1_000_000, by="suite"), 409)
            await _refused(connector.retire(["decode-9"], by="suite"), 404)
            await _refused(connector.retire([name, "decode-9"], by="suite"), 404)
            await _refused(connector.flip("decode-9", Role.PREFILL, by="suite"), 404)
            await _refused(connector.flip(name, Role.DECODE, by="suite"), 409)
            after = await connector.scale()
            assert after.revision == before.revision
            assert [_without_age(replica) for replica in after.replicas] == [
                _without_age(replica) for replica in before.replicas
            ]

        self._run(_PAIR, check)

    def test_of_two_controllers_the_slower_one_is_refused(self) -> None:
        async def check(connector: ScalingConnector) -> None:
            seen = (await connector.scale()).revision
            old, _ = await _names(connector, Role.DECODE)
            (name,) = await connector.add(Role.DECODE, by="first", revision=seen)
            error = await _refused(connector.add(Role.DECODE, by="second", revision=seen), 409)
            assert "first" in error.message
            await _refused(connector.retire([name], by="second", revision=seen), 409)
            await _refused(connector.flip(old, Role.PREFILL, by="second", revision=seen), 409)
            await connector.retire([name], by="second", revision=(await connector.scale()).revision)

        self._run(_PAIR, check)

    def test_a_draining_worker_is_not_retired_again(self) -> None:
        async def check(connector: ScalingConnector) -> None:
            _, name = await _names(connector, Role.DECODE)
            await connector.retire([name], by="suite")
            await _refused_while_it_drains(connector, name, connector.retire([name], by="suite"))
            await _refused_while_it_drains(connector, name, connector.flip(name, Role.PREFILL, by="suite"))

        self._run(_PAIR, check)

    def test_who_waits_for_a_change_hears_of_it(self) -> None:
        async def check(connector: ScalingConnector) -> None:
            seen = await connector.scale()
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(connector.scale(seen.sequence))
                await asyncio.sleep(0)
                await connector.add(Role.AGGREGATED, by="suite")
            assert waiting.result().sequence > seen.sequence

        self._run(_ALONE, check)

    def _run(
        self, replicas: Mapping[Role, int], check: Callable[[ScalingConnector], Awaitable[None]]
    ) -> None:
        async def main() -> None:
            async with self.make(replicas) as connector:
                await check(connector)

        run_async(main(), loop_factory=self.loop_factory)


READY = ReplicaState.READY


async def _until(connector: ScalingConnector, holds: Callable[[Scale], bool]) -> None:
    """Wait for a state; the test's time limit bounds it."""
    scale = await connector.scale()
    while not holds(scale):
        scale = await connector.scale(scale.sequence)


async def _refused(attempt: Awaitable[object], status: int) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await attempt
    assert caught.value.http_status == status, caught.value.message
    return caught.value


async def _refused_while_it_drains(
    connector: ScalingConnector, name: str, attempt: Awaitable[object]
) -> None:
    with pytest.raises(RequestError) as caught:
        await attempt
    if caught.value.http_status != 409:  # it has ended by now
        assert caught.value.http_status == 404, caught.value.message
        assert all(replica.name != name for replica in (await connector.scale()).replicas)


async def _names(connector: ScalingConnector, role: Role) -> list[str]:
    return [replica.name for replica in (await connector.scale()).of(role)]


def _replica(scale: Scale, name: str) -> Replica:
    return next(replica for replica in scale.replicas if replica.name == name)


def _state(scale: Scale, name: str) -> ReplicaState:
    return _replica(scale, name).state


def _without_age(replica: Replica) -> tuple[str, Role, ReplicaState]:
    return replica.name, replica.role, replica.state
