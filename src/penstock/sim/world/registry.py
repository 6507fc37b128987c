"""Discovery over the simulated network: a registry on its own host, with leases that can expire."""

import asyncio
from collections.abc import Callable

from penstock.core.ids import WorkerId
from penstock.core.types.instances import Instance
from penstock.runtime.discovery.view import InstanceTable, TableCursor, TableWatch
from penstock.sim.world.network import REGISTRY, SimNetwork

_RENEWALS_A_LEASE = 3


class SimRegistry:
    """The registry; `at` gives a host's client.

    Renewals are not simulated: a lease expires once its host could not reach the registry for `lease_ttl_s`. A worker that
    learns of its expired lease registers again.
    """

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.table = InstanceTable(watchers_max=1 << 16)
        self.table.mark_synced()
        self.registrations: dict[WorkerId, SimRegistration] = {}

    def at(self, host: str) -> "HostDiscovery":
        return HostDiscovery(self, host)

    def kill(self, host: str) -> None:
        """Stop renewing the host's leases."""
        for registration in [r for r in self.registrations.values() if r.host == host]:
            registration.abandon()

    def lose_lease(self, host: str) -> None:
        """Drop the host's registrations, as after a registry restart; the host registers again."""
        for registration in [r for r in self.registrations.values() if r.host == host]:
            registration.lapse("lease lost")


class HostDiscovery:
    """The `seams.Discovery` of one host."""

    def __init__(self, registry: SimRegistry, host: str) -> None:
        self.registry = registry
        self.host = host
        self.is_closed = False
        self._wakeups: list[asyncio.Event] = []

    async def register(self, instance: Instance) -> "SimRegistration":
        network = self.registry.network
        await network.reach(self.host, REGISTRY)
        registration = SimRegistration(self.registry, self.host, instance)
        await network.reach(REGISTRY, self.host)
        return registration

    def watch(self) -> "HostWatch":
        wakeup = asyncio.Event()
        wakeup.set()
        self._wakeups.append(wakeup)
        return HostWatch(self, self.registry.table.cursor(wakeup.set), wakeup)

    async def close(self) -> None:
        """End this host's watches; other hosts keep using the registry."""
        self.is_closed = True
        for wakeup in self._wakeups:
            wakeup.set()


class HostWatch(TableWatch):
    """Watch of `HostDiscovery.watch`; changes arrive over the network."""

    def __init__(self, discovery: HostDiscovery, cursor: TableCursor, wakeup: asyncio.Event) -> None:
        super().__init__(discovery, cursor, wakeup)
        self._discovery = discovery

    async def _wait_for_changes(self) -> None:
        if not self._discovery.is_closed:
            await self._discovery.registry.network.reach(REGISTRY, self._discovery.host)

    def __del__(self) -> None:
        super().__del__()
        self._discovery._wakeups.remove(self._wakeup)


class SimRegistration:
    """One worker's registration."""

    def __init__(self, registry: SimRegistry, host: str, instance: Instance) -> None:
        self.host = host
        self._registry = registry
        self._instance = instance
        self._timer: asyncio.TimerHandle | None = None  # end of the lease, or next registration
        self._is_listed = True
        self._is_alive = True
        registry.registrations[instance.worker_id] = self
        registry.table.put(instance)
        registry.network.add(self)

    @property
    def ends(self) -> tuple[str, str]:
        return self.host, REGISTRY

    async def update(self, instance: Instance) -> None:
        await self._registry.network.reach(*self.ends)
        if self._is_alive:
            self._instance = instance
            if self._is_listed:
                self._registry.table.put(instance)

    async def close(self) -> None:
        if not self._is_alive:
            return
        await self._registry.network.reach(*self.ends)
        self._end("withdrawn")

    def abandon(self) -> None:
        """Stop renewing: the process has ended."""
        self._is_alive = False
        self._registry.network.drop(self)
        if not self._is_listed:
            self._end("lease expired")
        elif self._timer is None:
            self._start(self._registry.network.config.lease_ttl_s, self._end)

    def lapse(self, reason: str = "lease expired") -> None:
        """Drop the registration; a running worker registers again when it reaches the registry."""
        if not self._is_alive:
            self._end(reason)
            return
        self._stop()
        self._is_listed = False
        self._registry.table.remove(self._instance.worker_id, reason)
        network = self._registry.network
        if network.is_open(*self.ends):
            self._start(network.config.lease_ttl_s / _RENEWALS_A_LEASE, self._return)

    def on_path(self, *, is_open: bool) -> None:
        if not is_open and self._is_listed and self._timer is None:
            self._start(self._registry.network.config.lease_ttl_s, self.lapse)
        elif is_open and self._is_listed:
            self._stop()
        elif is_open and self._timer is None:
            self._start(self._registry.network.latency_s(*self.ends), self._return)

    def _return(self) -> None:
        self._timer = None
        if self._is_alive and self._registry.network.is_open(*self.ends):
            self._is_listed = True
            self._registry.table.put(self._instance)

    def _end(self, reason: str = "lease expired") -> None:
        self._is_alive = self._is_listed = False
        self._stop()
        self._registry.network.drop(self)
        self._registry.registrations.pop(self._instance.worker_id, None)
        self._registry.table.remove(self._instance.worker_id, reason)

    def _start(self, delay_s: float, call: Callable[[], None]) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(delay_s, call)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
