"""What a client of a registry knows: the instances, and those that have lapsed and may come back.

A registry that was hung, restarted or lost its data lets leases lapse whose workers live. So an instance whose lease lapses, or
that is missing after a reconnect, stays for a grace time, in which a living worker registers again. Withdrawn ones go at once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Protocol, Self

from penstock.core.errors import Overloaded
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance, InstanceChange, InstancePut, InstanceRemoved, WatchSynced
from penstock.runtime.discovery.registrations import RecordError, Records, RegistryMetrics

_REASONS_MAX = 1024  # latest removals whose reason is kept; a watcher further behind reports no reason


class InstanceTable:
    """Instances by worker, with any number of watchers up to `watchers_max`. One event loop owns it."""

    def __init__(self, *, watchers_max: int = 1024) -> None:
        self._instances: dict[WorkerId, Instance] = {}
        self._reasons: OrderedDict[WorkerId, str] = OrderedDict()
        self._wakeups: dict[TableCursor, Callable[[], None]] = {}
        self._watchers_max = watchers_max
        self._syncs = 0
        self.is_closed = False

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._instances

    def __len__(self) -> int:
        return len(self._instances)

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(self._instances)

    def put(self, instance: Instance) -> None:
        if self._instances.get(instance.worker_id) != instance:
            self._instances[instance.worker_id] = instance
            self._wake()

    def remove(self, worker_id: WorkerId, reason: str) -> None:
        if self._instances.pop(worker_id, None) is None:
            return
        self._reasons[worker_id] = reason
        if len(self._reasons) > _REASONS_MAX:
            self._reasons.popitem(last=False)
        self._wake()

    def mark_synced(self) -> None:
        """Make every watcher yield `WatchSynced` after the changes so far."""
        self._syncs += 1
        self._wake()

    def close(self) -> None:
        """End every watch."""
        self.is_closed = True
        self._wake()

    def cursor(self, wakeup: Callable[[], None]) -> "TableCursor":
        """Make a cursor; `wakeup` is called when it may have changes.

        Raises:
            Overloaded: there are `watchers_max` cursors already.
        """
        if len(self._wakeups) >= self._watchers_max:
            raise Overloaded(f"discovery: {self._watchers_max} watchers already; close one (watchers_max)")
        cursor = TableCursor(self)
        self._wakeups[cursor] = wakeup
        return cursor

    def watch(self) -> "TableWatch":
        """Yield all known instances, then `WatchSynced` (once `mark_synced` was called), then changes.

        Raises:
            Overloaded: there are `watchers_max` watchers already.
        """
        wakeup = asyncio.Event()
        wakeup.set()
        return TableWatch(self, self.cursor(wakeup.set), wakeup)

    def _wake(self) -> None:
        for wakeup in tuple(self._wakeups.values()):
            wakeup()


class TableCursor:
    """The state that one watcher has reported."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table
        self._reported: dict[WorkerId, Instance] = {}
        self._syncs_reported = 0

    def changes(self) -> Iterator[InstanceChange]:
        """Yield the differences between the reported state and the current one, and mark them as reported."""
        table = self._table
        syncs = table._syncs
        for worker_id in [w for w in self._reported if w not in table._instances]:
            del self._reported[worker_id]
            yield InstanceRemoved(worker_id=worker_id, reason=table._reasons.get(worker_id, ""))
        for instance in [i for i in table._instances.values() if self._reported.get(i.worker_id) != i]:
            self._reported[instance.worker_id] = instance
            yield InstancePut(instance=instance)
        if syncs != self._syncs_reported:
            self._syncs_reported = syncs
            yield WatchSynced()

    def close(self) -> None:
        """Remove the cursor. Safe twice."""
        self._table._wakeups.pop(self, None)


class WatchOwner(Protocol):
    """An owner whose closing ends its watches."""

    @property
    def is_closed(self) -> bool: ...


class TableWatch:
    """The iterator of `Discovery.watch`. A cancelled `anext` loses no change."""

    def __init__(self, owner: "WatchOwner", cursor: TableCursor, wakeup: asyncio.Event) -> None:
        """Yield a cursor's changes until the owner is closed; `wakeup` is set when either has changed."""
        self._owner = owner
        self._cursor = cursor
        self._wakeup = wakeup
        self._changes: Iterator[InstanceChange] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InstanceChange:
        while not self._owner.is_closed:
            change = next(self._changes, None)
            if change is not None:
                return change
            await self._wakeup.wait()
            await self._wait_for_changes()
            self._wakeup.clear()
            self._changes = self._cursor.changes()
        raise StopAsyncIteration

    async def _wait_for_changes(self) -> None:
        """Wait until the changes arrive; a hook for simulated networks, nothing to wait for in one process."""

    def __del__(self) -> None:
        self._cursor.close()  # so leaving an `async for` is enough


_REFUSED_MAX = 1024
_log = get_logger()


class RegistryView:
    """The instances of one registry. One event loop owns it."""

    def __init__(
        self,
        records: Records,
        metrics: RegistryMetrics,
        *,
        grace_s: float,
        instances_max: int,
        watchers_max: int,
        is_reachable: Callable[[], bool],
    ) -> None:
        """Know nothing yet.

        Args:
            records: reads registrations.
            metrics: counts those that are refused.
            grace_s: how long a lapsed instance stays.
            instances_max: instances known at once; more are refused.
            watchers_max: watchers at once.
            is_reachable: whether the registry answers now; while it does not, nothing is removed.
        """
        self._table = InstanceTable(watchers_max=watchers_max)
        self._records = records
        self._metrics = metrics
        self._grace_s = grace_s
        self._instances_max = instances_max
        self._is_reachable = is_reachable
        self._lapsed: dict[WorkerId, asyncio.TimerHandle] = {}
        self._overdue: set[WorkerId] = set()
        """Of `_lapsed`, those whose grace ended while the registry was away: they get another one."""
        self._refused: OrderedDict[WorkerId, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def watch(self) -> TableWatch:
        return self._table.watch()

    def put(self, worker_id: WorkerId, data: bytes) -> None:
        """Take a registration; one that cannot be used is logged and counted once."""
        try:
            instance = self._records.decode(data)
        except RecordError as error:
            self._refuse(worker_id, error.reason, error.message)
            return
        if worker_id not in self._table and len(self._table) >= self._instances_max:
            text = f"{self._instances_max} workers are known already (runtime.registry.instances_max)"
            self._refuse(worker_id, "too_many", text)
            return
        self._refused.pop(worker_id, None)
        self._keep(worker_id)
        if instance.worker_id == worker_id:
            self._table.put(instance)

    def _refuse(self, worker_id: WorkerId, reason: str, text: str) -> None:
        if self._refused.get(worker_id) == text:
            return
        self._refused[worker_id] = text
        self._metrics.refused.labels(reason).inc()
        _log.warning("registration_refused", worker_id=worker_id, error=text)
        if len(self._refused) > _REFUSED_MAX:
            self._refused.popitem(last=False)

    def keep(self, worker_id: WorkerId) -> bool:
        """Note that a worker registers again as it was; False if it is not known."""
        self._keep(worker_id)
        return worker_id in self._table

    def withdraw(self, worker_id: WorkerId, reason: str) -> None:
        """Remove an instance at once."""
        self._keep(worker_id)
        self._table.remove(worker_id, reason)

    def lapse(self, worker_id: WorkerId, reason: str, *, grace_s: float | None = None) -> None:
        """Remove an instance after a grace time, unless it is put again; None is the view's own time."""
        if worker_id in self._table and worker_id not in self._lapsed:
            grace_s = self._grace_s if grace_s is None else grace_s
            loop = asyncio.get_running_loop()
            self._lapsed[worker_id] = loop.call_later(grace_s, self._end_grace, worker_id, reason)

    def sync(self, present: set[WorkerId], graces_s: Mapping[WorkerId, float] | None = None) -> None:
        """Tell watchers that the registry was read.

        Args:
            present: the workers that it has.
            graces_s: of those that are missing, where it is not the view's own time.
        """
        for worker_id in [each for each in self._table if each not in present]:
            if worker_id in self._overdue:
                self._keep(worker_id)
            reason = "it did not register again after the registry was lost"
            self.lapse(worker_id, reason, grace_s=(graces_s or {}).get(worker_id))
        self._table.mark_synced()

    def close(self) -> None:
        """End every watch. Safe twice."""
        for timer in self._lapsed.values():
            timer.cancel()
        self._lapsed.clear()
        self._table.close()

    def _keep(self, worker_id: WorkerId) -> None:
        self._overdue.discard(worker_id)
        timer = self._lapsed.pop(worker_id, None)
        if timer is not None:
            timer.cancel()

    def _end_grace(self, worker_id: WorkerId, reason: str) -> None:
        self._keep(worker_id)
        if self._is_reachable():
            self._table.remove(worker_id, reason)
        else:
            self.lapse(worker_id, reason)
            self._overdue.add(worker_id)


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
