"""The instances that one process knows, and watchers of their changes.

A watcher compares the state that it last reported with the current one, so it needs no queue. Its memory is bounded by the
number of instances, however slow its reader is, and quick successive changes collapse into one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol, Self

from penstock.core.errors import Overloaded
from penstock.core.ids import WorkerId
from penstock.core.types.instances import Instance, InstanceChange, InstancePut, InstanceRemoved, WatchSynced

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
