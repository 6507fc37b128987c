"""A simulated deployment as a planner meets it: a connector to scale it by, and what its processes see."""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from penstock.core.types.instances import Replica, ReplicaState, Role
from penstock.planner.act.memory_connector import MemoryConnector
from penstock.planner.explain.record import DecisionRecord
from penstock.planner.observe.observation import Observation
from penstock.planner.observe.stream import ObservationStream
from penstock.runtime.observations import RequestRecorder
from penstock.sim.counters import Counters
from penstock.sim.scaling.cluster_changes import ClusterChanges
from penstock.sim.scaling.record import RoleCount, ScalingRecord
from penstock.sim.world.cluster import SimCluster, SimWorker

_WINDOW_S = 1.0
"""Processes of a deployment send a window each second."""
START_S = 60.0
"""Seconds of a worker's start where nobody says: an 8B model from a local disk, with its engine."""


class ScaledCluster:
    """An async context, which ends all changes under way. One event loop owns it."""

    def __init__(
        self, cluster: SimCluster, replicas: Mapping[Role, int], *, start_s: float = START_S, workers_max: int
    ) -> None:
        """Start nothing yet; entering the context starts the workers and returns once they serve.

        Args:
            cluster: a cluster without workers.
            replicas: workers of each role in the beginning; a role with 0 may get some later.
            start_s: seconds from a worker's start until it registers; those of the beginning take none.
            workers_max: most workers of all roles together.
        """
        self.cluster = cluster
        self.record = ScalingRecord()
        self.ended: dict[Role, list[Counters]] = {}
        """Counters of workers that have ended, by their last role."""
        self._group = asyncio.TaskGroup()
        self.changes = ClusterChanges(cluster, self._group, loads_s=start_s)
        self.connector = MemoryConnector(replicas, workers_max=workers_max, changes=self.changes)
        """A `seams.ScalingConnector`."""
        self._stream = ObservationStream()
        self._recorders: Sequence[RequestRecorder] = ()
        self._begun_s = 0.0
        self._present: dict[str, tuple[Role, float]] = {}
        """(home, since when) of each worker that holds devices."""
        self.changes.on_failed = self.connector.fail
        self.changes.on_ended = self._note_end

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        for replica in self.connector.workers:
            self.changes.adopt(await self.cluster.start(replica.name, replica.role))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.changes.close()
        await self._group.__aexit__(kind, error, trace)

    async def observe(self, seconds: float) -> Observation:
        """Add up what frontends and workers saw in the last seconds."""
        return self._stream.observe(seconds)

    def begin(self, recorders: Sequence[RequestRecorder]) -> None:
        """Begin to record: now the first request is due.

        Args:
            recorders: one of each frontend, in the order of the cluster's dispatchers.
        """
        self._recorders = recorders
        self._begun_s = asyncio.get_running_loop().time()
        self._present = {each.name: (each.role, self._begun_s) for each in self.connector.workers}
        self.connector.on_state = self._note_state
        self._count()

    async def send_windows(self) -> None:
        """Send what each process saw in the last second, each second for ever."""
        while True:
            await asyncio.sleep(_WINDOW_S)
            for number, dispatcher in enumerate(self.cluster.dispatchers):
                queued, oldest_s = dispatcher.queued()
                window = self._recorders[number].take(queued=queued, oldest_queued_s=oldest_s)
                self._stream.put(f"frontend-{number + 1}", window)
            for name, worker in self.cluster.workers.items():
                if worker.worker.ready.is_set():
                    self._stream.put(name, worker.worker.observe())

    def keep(self, record: DecisionRecord) -> None:
        """Keep a round of a planner, as its `on_record`."""
        self.record.rounds[record.outcome] += 1
        if record.is_change:
            self.record.decisions.append((record.at_s - self._begun_s, record))

    def end(self, end_s: float) -> None:
        """End the record after `end_s` seconds."""
        for home, since_s in self._present.values():
            self._add(home, self._begun_s + end_s - since_s)
        self._present.clear()
        self.record.counts = [entry for entry in self.record.counts if entry[0] <= end_s]

    def _note_state(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        is_here = any(each.name == replica.name for each in self.connector.workers)
        if not is_here:
            self._stream.forget(replica.name)
            home, since_s = self._present.pop(replica.name)
            self._add(home, loop.time() - since_s)
        elif replica.state is ReplicaState.DRAINING:
            self.record.changes["retire"] += 1
        elif replica.state is ReplicaState.FLIPPING:
            self.record.changes["flip"] += 1
        elif replica.name not in self._present:
            self.record.changes["add"] += 1
            self._present[replica.name] = replica.role, loop.time()
        self._count()

    def _note_end(self, worker: SimWorker) -> None:
        self._stream.forget(worker.name)
        self.ended.setdefault(worker.role, []).append(Counters.of([worker], self.cluster))

    def _add(self, home: Role, seconds: float) -> None:
        self.record.worker_s[home] = self.record.worker_s.get(home, 0.0) + max(0.0, seconds)

    def _count(self) -> None:
        """Note how many workers there are, if that has changed."""
        at_s = asyncio.get_running_loop().time() - self._begun_s
        counts: dict[Role, RoleCount] = {}
        for replica in self.connector.workers:
            ready, present = counts.get(replica.role, RoleCount())
            counts[replica.role] = RoleCount(ready + (replica.state is ReplicaState.READY), present + 1)
        record = self.record.counts
        if record and record[-1][0] == at_s:
            record.pop()
        if not record or record[-1][1] != counts:
            record.append((at_s, counts))
