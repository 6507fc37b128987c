"""What a client of a registry knows: the instances, and those that have lapsed and may come back.

A registry that was hung, restarted or lost its data lets leases lapse whose workers live. So an instance whose lease lapses, or
that is missing after a reconnect, stays for a grace time, in which a living worker registers again. Withdrawn ones go at once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping

from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.runtime.discovery.metrics import RegistryMetrics
from penstock.runtime.discovery.record import RecordError, Records
from penstock.runtime.discovery.table import InstanceTable, TableWatch

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
