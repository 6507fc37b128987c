"""The instances one process knows of, and how their changes are told.

A watcher compares what it last told with what is true now, so it needs no queue: its memory is bounded
by the number of instances however slow its reader is, and quick changes in between collapse into one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, Self

from penstock.core.errors import Overloaded
from penstock.core.ids import WorkerId
from penstock.core.types.instances import Instance, InstanceChange, InstancePut, InstanceRemoved, WatchSynced

_REASONS_MAX = 1024  # why the latest instances went; a watcher further behind than this tells no reason


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

    def get(self, worker_id: WorkerId) -> Instance | None:
        return self._instances.get(worker_id)

    def values(self) -> Iterable[Instance]:
        return self._instances.values()

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
        """Have every watcher yield `WatchSynced` once it has told what is known now."""
        self._syncs += 1
        self._wake()

    def close(self) -> None:
        """End every watch."""
        self.is_closed = True
        self._wake()

    def cursor(self, wakeup: Callable[[], None]) -> "TableCursor":
        """Follow the table; `wakeup` is called whenever the cursor may have something to tell.

        Raises:
            Overloaded: `watchers_max` cursors are there already.
        """
        if len(self._wakeups) >= self._watchers_max:
            raise Overloaded(f"discovery: {self._watchers_max} watchers already; close one (watchers_max)")
        cursor = TableCursor(self)
        self._wakeups[cursor] = wakeup
        return cursor

    def watch(self) -> "TableWatch":
        """Yield what is known, then `WatchSynced` (once `mark_synced` was called), then changes.

        Raises:
            Overloaded: `watchers_max` watchers are there already.
        """
        wakeup = asyncio.Event()
        wakeup.set()
        return TableWatch(self, self.cursor(wakeup.set), wakeup)

    def _wake(self) -> None:
        for wakeup in tuple(self._wakeups.values()):
            wakeup()


class TableCursor:
    """What one watcher has been told."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table
        self._told: dict[WorkerId, Instance] = {}
        self._syncs_told = 0

    def changes(self) -> Iterator[InstanceChange]:
        """Give the differences between what was told and what is, each as it is at that moment."""
        table = self._table
        syncs = table._syncs
        for worker_id in [w for w in self._told if w not in table._instances]:
            del self._told[worker_id]
            yield InstanceRemoved(worker_id=worker_id, reason=table._reasons.get(worker_id, ""))
        for instance in [i for i in table._instances.values() if self._told.get(i.worker_id) != i]:
            self._told[instance.worker_id] = instance
            yield InstancePut(instance=instance)
        if syncs != self._syncs_told:
            self._syncs_told = syncs
            yield WatchSynced()

    def close(self) -> None:
        """Follow no more. Safe twice."""
        self._table._wakeups.pop(self, None)


class WatchOwner(Protocol):
    """Whose end is the end of its watches."""

    @property
    def is_closed(self) -> bool: ...


class TableWatch:
    """The iterator that `Discovery.watch` gives. A cancelled wait loses nothing: take the next change later."""

    def __init__(self, owner: "WatchOwner", cursor: TableCursor, wakeup: asyncio.Event) -> None:
        """Follow a cursor until the owner is closed; `wakeup` is set when either may have news."""
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
            await self._hear()
            self._wakeup.clear()
            self._changes = self._cursor.changes()
        raise StopAsyncIteration

    async def _hear(self) -> None:
        """Wait until the news are here; in one process they are at once."""

    def __del__(self) -> None:
        self._cursor.close()  # an `async for` that was left needs no other end
