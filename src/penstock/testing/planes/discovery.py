"""The conformance suite of discovery. Subclass it and name a harness.

    class TestLocalDiscovery(DiscoverySuite):
        harness = LocalDiscoveryHarness

For your own discovery, write a `DiscoveryHarness`.
"""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol, Self

import msgspec

from penstock.core.ids import WorkerId
from penstock.core.types.instances import (
    Instance,
    InstanceChange,
    InstancePut,
    InstanceRemoved,
    InstanceState,
    WatchSynced,
)
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.local import LocalDiscovery, LocalHub
from penstock.runtime.discovery.view import MemoryDiscovery, MemoryRegistration
from penstock.runtime.handshake import Identity
from penstock.seams import Discovery
from penstock.testing.loop import run_async
from penstock.testing.planes.peer import Peer, member_peer
from penstock.testing.planes.scripted_worker import scripted_instance

_IDENTITY = Identity(process="suite", secret=b"of the suite")
_TTL_S = 1.0


class DiscoveryHarness(Protocol):
    """What the suite needs of a discovery. Leaving the context ends everything it started."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def client(self) -> Discovery:
        """Make a discovery client; all clients share one registry."""
        ...

    async def start_member(self, instance: Instance) -> None:
        """Register `instance`, from another process if the discovery crosses processes."""
        ...

    async def kill_member(self, instance: Instance) -> None:
        """Kill the process that registered the instance, without a withdrawal."""
        ...


class MemoryDiscoveryHarness:
    """Everything on the test's own event loop."""

    def __init__(self) -> None:
        self._discovery = MemoryDiscovery(lease_ttl_s=_TTL_S)
        self._members: dict[WorkerId, MemoryRegistration] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._discovery.close()

    async def client(self) -> Discovery:
        return self._discovery

    async def start_member(self, instance: Instance) -> None:
        self._members[instance.worker_id] = await self._discovery.register(instance)

    async def kill_member(self, instance: Instance) -> None:
        self._members[instance.worker_id].abandon()


class LocalDiscoveryHarness:
    """A hub on the test's event loop; each member is a separate process."""

    def __init__(self, config: DiscoveryConfig | None = None) -> None:
        self.config = config or DiscoveryConfig(lease_ttl_s=_TTL_S, linger_s=0.1)
        self.hub: LocalHub
        self._members: dict[WorkerId, Peer] = {}
        self._stack = AsyncExitStack()
        self._address = ""

    async def __aenter__(self) -> Self:
        directory = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._address = f"unix://{Path(directory) / 'hub.sock'}"
        await self.start_hub()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members.values():
            await member.close()
        await self.hub.close()
        await self._stack.aclose()

    async def start_hub(self) -> None:
        """Start an empty hub at the address of the last one."""
        self.hub = LocalHub(_IDENTITY, listen=self._address, config=self.config)
        await self.hub.start()

    async def client(self) -> LocalDiscovery:
        rng = random.Random(1)
        discovery = LocalDiscovery(self.hub.address, _IDENTITY, rng=rng, config=self.config)
        return await self._stack.enter_async_context(discovery)

    async def start_member(self, instance: Instance) -> None:
        rng = random.Random(instance.worker_id)
        client = partial(LocalDiscovery, self.hub.address, _IDENTITY, rng=rng, config=self.config)
        self._members[instance.worker_id] = await Peer.start(member_peer, client, instance)

    async def kill_member(self, instance: Instance) -> None:
        await self._members[instance.worker_id].kill()

    def pid(self, instance: Instance) -> int:
        """Return the process that registered the instance."""
        return self._members[instance.worker_id].pid


class Watcher:
    """A watch, and the instances that its changes add up to."""

    def __init__(self, discovery: Discovery) -> None:
        """Begin to watch."""
        self.present: dict[WorkerId, Instance] = {}
        self.removed: list[InstanceRemoved] = []
        self.syncs = 0
        self.changes: AsyncIterator[InstanceChange] = discovery.watch()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Take changes until `condition()` holds. The caller sets a timeout."""
        while not condition():
            self.take(await anext(self.changes))

    async def synced(self) -> None:
        syncs = self.syncs
        await self.until(lambda: self.syncs > syncs)

    def take(self, change: InstanceChange) -> None:
        match change:
            case InstancePut(instance=instance):
                assert self.present.get(instance.worker_id) != instance, "told twice"
                self.present[instance.worker_id] = instance
            case InstanceRemoved():
                assert change.worker_id in self.present, "removed, but never told"
                del self.present[change.worker_id]
                self.removed.append(change)
            case WatchSynced():
                self.syncs += 1

    async def quiet(self, seconds: float) -> None:
        """Assert that no change arrives for so long."""
        try:
            async with asyncio.timeout(seconds):
                change = await anext(self.changes)
        except TimeoutError:
            return
        raise AssertionError(f"unexpected {change}")


class DiscoverySuite:
    """The contract of `Discovery` and `Registration`."""

    harness: ClassVar[Callable[[], DiscoveryHarness]]
    lease_ttl_s: ClassVar[float] = _TTL_S
    """How long after its last renewal an instance is removed, by the harness's configuration."""
    loop_factory: ClassVar[Callable[[], asyncio.AbstractEventLoop]] = asyncio.new_event_loop
    """Makes the event loop of the tests; of virtual time if nothing runs outside of it."""

    def run(self, scenario: Callable[[DiscoveryHarness], Awaitable[None]]) -> None:
        async def main() -> None:
            async with type(self).harness() as harness:
                await scenario(harness)

        run_async(main(), loop_factory=type(self).loop_factory)

    def test_an_empty_registry_syncs_at_once(self) -> None:
        async def scenario(harness: DiscoveryHarness) -> None:
            watcher = Watcher(await harness.client())
            await watcher.synced()
            assert watcher.present == {}

        self.run(scenario)

    def test_present_instances_come_before_the_sync(self) -> None:
        async def scenario(harness: DiscoveryHarness) -> None:
            discovery = await harness.client()
            instances = [scripted_instance(f"tcp://127.0.0.1:{i + 1}") for i in range(5)]
            for instance in instances:
                await discovery.register(instance)
            for client in (discovery, await harness.client()):
                watcher = Watcher(client)
                await watcher.synced()
                assert watcher.present == {instance.worker_id: instance for instance in instances}

        self.run(scenario)

    def test_changes_follow(self) -> None:
        async def scenario(harness: DiscoveryHarness) -> None:
            discovery = await harness.client()
            watcher = Watcher(await harness.client())
            await watcher.synced()
            instance = scripted_instance("tcp://127.0.0.1:1")
            registration = await discovery.register(instance)
            await watcher.until(lambda: watcher.present == {instance.worker_id: instance})
            draining = msgspec.structs.replace(instance, state=InstanceState.DRAINING)
            await registration.update(draining)
            await watcher.until(lambda: watcher.present == {instance.worker_id: draining})
            await registration.close()
            await registration.close()
            await watcher.until(lambda: not watcher.present)
            assert watcher.removed[-1].reason

        self.run(scenario)

    def test_a_closed_registration_stays_closed(self) -> None:
        async def scenario(harness: DiscoveryHarness) -> None:
            discovery = await harness.client()
            instance = scripted_instance("tcp://127.0.0.1:1")
            registration = await discovery.register(instance)
            await registration.close()
            await registration.update(instance)
            watcher = Watcher(discovery)
            await watcher.synced()
            assert watcher.present == {}

        self.run(scenario)

    def test_a_slow_watcher_sees_the_final_state(self) -> None:
        async def scenario(harness: DiscoveryHarness) -> None:
            discovery = await harness.client()
            watcher = Watcher(discovery)
            await watcher.synced()
            kept = scripted_instance("tcp://127.0.0.1:1")
            await discovery.register(kept)
            for _ in range(100):
                registration = await discovery.register(scripted_instance("tcp://127.0.0.1:2"))
                await registration.close()
            last = scripted_instance("tcp://127.0.0.1:3")
            await discovery.register(last)
            await watcher.until(lambda: last.worker_id in watcher.present)
            await watcher.until(lambda: watcher.present.keys() == {kept.worker_id, last.worker_id})

        self.run(scenario)

    def test_a_lease_is_renewed(self) -> None:
        async def scenario(harness: DiscoveryHarness) -> None:
            instance = scripted_instance("tcp://127.0.0.1:1")
            await harness.start_member(instance)
            watcher = Watcher(await harness.client())
            await watcher.synced()
            assert watcher.present == {instance.worker_id: instance}
            await watcher.quiet(2.5 * self.lease_ttl_s)

        self.run(scenario)

    def test_a_dead_worker_is_removed_when_its_lease_ends(self) -> None:
        async def scenario(harness: DiscoveryHarness) -> None:
            instance, other = scripted_instance("tcp://127.0.0.1:1"), scripted_instance("tcp://127.0.0.1:2")
            await harness.start_member(instance)
            await harness.start_member(other)
            watcher = Watcher(await harness.client())
            await watcher.synced()
            await harness.kill_member(instance)
            await watcher.until(lambda: watcher.present.keys() == {other.worker_id})

        self.run(scenario)

    def test_a_cancelled_wait_loses_nothing(self) -> None:
        async def scenario(harness: DiscoveryHarness) -> None:
            discovery = await harness.client()
            watcher = Watcher(discovery)
            await watcher.synced()
            await watcher.quiet(0.02)
            instance = scripted_instance("tcp://127.0.0.1:1")
            await discovery.register(instance)
            await watcher.until(lambda: instance.worker_id in watcher.present)

        self.run(scenario)

    def test_a_watch_can_be_left(self) -> None:
        async def scenario(harness: DiscoveryHarness) -> None:
            discovery = await harness.client()
            for _ in range(3):
                async for change in discovery.watch():
                    assert isinstance(change, WatchSynced)
                    break
            await discovery.close()
            await discovery.close()
            assert [change async for change in discovery.watch()] == []

        self.run(scenario)
