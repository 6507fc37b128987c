"""Discovery inside one process: the reference implementation, also for tests and simulations."""

import asyncio
from collections.abc import AsyncIterator

from penstock.core.ids import WorkerId
from penstock.core.types.instances import Instance, InstanceChange
from penstock.runtime.discovery.table import InstanceTable


class MemoryDiscovery:
    """A registry shared by everything on one event loop.

    Inside one process leases are never missed, so only an `abandon`ed registration expires. Tests use `abandon` to imitate
    a worker that dies or hangs.
    """

    def __init__(self, *, lease_ttl_s: float = 5.0) -> None:
        self.lease_ttl_s = lease_ttl_s
        self._table = InstanceTable()
        self._table.mark_synced()
        self._owners: dict[WorkerId, MemoryRegistration] = {}

    async def register(self, instance: Instance) -> "MemoryRegistration":
        registration = MemoryRegistration(self, instance.worker_id)
        self._owners[instance.worker_id] = registration
        self._table.put(instance)
        return registration

    def watch(self) -> AsyncIterator[InstanceChange]:
        return self._table.watch()

    async def close(self) -> None:
        self._table.close()

    def _update(self, owner: "MemoryRegistration", instance: Instance) -> None:
        if self._owners.get(instance.worker_id) is owner:
            self._table.put(instance)

    def _withdraw(self, owner: "MemoryRegistration", reason: str) -> None:
        if self._owners.get(owner.worker_id) is owner:
            del self._owners[owner.worker_id]
            self._table.remove(owner.worker_id, reason)


class MemoryRegistration:
    """One worker's registration in a `MemoryDiscovery`."""

    def __init__(self, discovery: MemoryDiscovery, worker_id: WorkerId) -> None:
        self.worker_id = worker_id
        self._discovery = discovery

    async def update(self, instance: Instance) -> None:
        self._discovery._update(self, instance)

    async def close(self) -> None:
        self._discovery._withdraw(self, "withdrawn")

    def abandon(self) -> None:
        """Stop renewing the lease, like a worker that dies: watchers see the removal after `lease_ttl_s`."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._discovery.lease_ttl_s, self._discovery._withdraw, self, "lease expired")
