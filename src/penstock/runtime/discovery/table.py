"""The instances one process knows of, and iterators over their changes.

A watcher compares what it last told with what is true now, so it needs no queue: its memory is bounded
by the number of instances however slow its reader is, and quick changes in between collapse into one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator

from penstock.core.errors import Overloaded
from penstock.core.ids import WorkerId
from penstock.core.types import Instance, InstanceChange, InstancePut, InstanceRemoved, WatchSynced

_REASONS_MAX = 1024  # why the latest instances went; a watcher further behind than this tells no reason


class InstanceTable:
    """Instances by worker, with any number of watchers up to `watchers_max`. One event loop owns it."""

    def __init__(self, *, watchers_max: int = 1024) -> None:
        self._instances: dict[WorkerId, Instance] = {}
        self._reasons: OrderedDict[WorkerId, str] = OrderedDict()
        self._wakeups: set[asyncio.Event] = set()
        self._watchers_max = watchers_max
        self._syncs = 0
        self._closed = False

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
        self._closed = True
        self._wake()

    async def watch(self) -> AsyncIterator[InstanceChange]:
        """Yield what is known, then `WatchSynced` (once `mark_synced` was called), then changes.

        Raises:
            Overloaded: `watchers_max` watchers are there already.
        """
        if len(self._wakeups) >= self._watchers_max:
            raise Overloaded(f"discovery: {self._watchers_max} watchers already; close one first")
        told: dict[WorkerId, Instance] = {}
        syncs_told = 0
        wakeup = asyncio.Event()
        self._wakeups.add(wakeup)
        try:
            while not self._closed:
                wakeup.clear()
                syncs = self._syncs
                for change in self._changes_since(told):
                    _tell(told, change)
                    yield change
                if wakeup.is_set():  # the table changed while the reader was busy
                    continue
                if syncs != syncs_told:
                    syncs_told = syncs
                    yield WatchSynced()
                await wakeup.wait()
        finally:
            self._wakeups.discard(wakeup)

    def _changes_since(self, told: dict[WorkerId, Instance]) -> list[InstanceChange]:
        changes: list[InstanceChange] = [
            InstanceRemoved(worker_id=worker_id, reason=self._reasons.get(worker_id, ""))
            for worker_id in told
            if worker_id not in self._instances
        ]
        changes += [
            InstancePut(instance=instance)
            for worker_id, instance in self._instances.items()
            if told.get(worker_id) != instance
        ]
        return changes

    def _wake(self) -> None:
        for wakeup in self._wakeups:
            wakeup.set()


def _tell(told: dict[WorkerId, Instance], change: InstanceChange) -> None:
    match change:
        case InstancePut(instance=instance):
            told[instance.worker_id] = instance
        case InstanceRemoved(worker_id=worker_id):
            told.pop(worker_id, None)
        case WatchSynced():
            pass
