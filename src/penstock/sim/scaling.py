"""Scales the workers of a simulated deployment by its planner, and records what became of them."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from penstock.core.errors import PenstockError
from penstock.core.types.instances import BecomeRole, Replica, ReplicaState, Role
from penstock.graph import Slo
from penstock.graph.capacities import make_capacity
from penstock.planner.capacity import Capacity
from penstock.planner.demand import SloTargets
from penstock.planner.memory_connector import Done, MemoryConnector
from penstock.planner.observation import Observation, ObservationStream
from penstock.planner.planner import Planner
from penstock.planner.record import DecisionRecord
from penstock.runtime.observations import RequestRecorder
from penstock.sim.cluster import SimCluster, SimWorker
from penstock.sim.deployment import RoleGroup, SimDeployment

_SETTLE_BEFORE_S = 0.001


class ClusterChanges:
    """The `WorkerChanges` of a `SimCluster`. One event loop owns it."""

    def __init__(self, cluster: SimCluster, group: asyncio.TaskGroup, *, loads_s: float) -> None:
        """Change nothing yet.

        Args:
            cluster: the workers.
            group: runs the changes.
            loads_s: seconds from a worker's start until it registers.
        """
        self.load: Callable[[str], Awaitable[None]] = lambda _name: asyncio.sleep(loads_s)
        """What a worker does between its start and its registration, by its name."""
        self.on_failed: Callable[[str], None] = lambda _name: None
        """Called with the name of a worker that has ended by itself, and starts again."""
        self.on_ended: Callable[[SimWorker], None] = lambda _worker: None
        """Called with each worker that has ended."""
        self._cluster = cluster
        self._group = group
        self._homes: dict[str, tuple[Role, int]] = {}
        """(role whose settings it has, number among these) of each worker."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The task of each worker that starts or runs."""
        self._starts_s: dict[Role, float] = {}

    def adopt(self, worker: SimWorker) -> None:
        """Watch a worker that runs already."""
        self._homes[worker.name] = worker.role, self._free_index(worker.role)
        self._tasks[worker.name] = self._group.create_task(
            self._watch(worker), name=f"watch of {worker.name}"
        )

    def home(self, name: str) -> Role:
        """Give the role whose settings and devices a worker has."""
        return self._homes[name][0]

    def close(self) -> None:
        """End all changes that are under way."""
        for task in self._tasks.values():
            task.cancel()

    # -- WorkerChanges

    def start_s(self, role: Role) -> float | None:
        return self._starts_s.get(role)

    def start(self, name: str, role: Role, done: Done) -> None:
        if name not in self._homes:
            self._homes[name] = role, self._free_index(role)
        self._tasks[name] = self._group.create_task(self._start(name, role, done), name=f"start of {name}")

    def stop(self, name: str, done: Done) -> None:
        self._tasks.pop(name).cancel()
        if name in self._cluster.workers:
            self._cluster.kill(name)
        self._leave(name, done)

    def drain(self, name: str, done: Done) -> None:
        self._tasks.pop(name).cancel()
        self._tasks[name] = self._group.create_task(self._drain(name, done), name=f"drain of {name}")

    def flip(self, name: str, role: Role, done: Done) -> None:
        worker = self._cluster.workers[name]
        self._settle_in_time(worker)
        worker.worker.change(
            BecomeRole(role=role),
            lambda outcome: done(outcome if isinstance(outcome, PenstockError) else None),
        )

    # -- changes

    async def _start(self, name: str, role: Role, done: Done) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await self.load(name)
        home, index = self._homes[name]
        worker = await self._cluster.start(name, role, index=index, home=home)
        if worker.worker.ready.is_set():
            self._starts_s[home] = loop.time() - begun_s
            done(None)
        await self._watch(worker)

    async def _watch(self, worker: SimWorker) -> None:
        """Wait until a worker ends by itself, and let it start again."""
        await asyncio.wait([worker.task])
        self.on_ended(worker)
        self.on_failed(worker.name)

    async def _drain(self, name: str, done: Done) -> None:
        worker = self._cluster.workers.get(name)
        if worker is not None:
            self._settle_in_time(worker)
            self._cluster.drain(name)
            await asyncio.wait([worker.task])
            self.on_ended(worker)
        del self._tasks[name]
        self._leave(name, done)

    def _leave(self, name: str, done: Done) -> None:
        del self._homes[name]
        done(None)

    def _settle_in_time(self, worker: SimWorker) -> None:
        """Deliver what was computed before requests that are left after a drain's patience move to other workers."""
        config = self._cluster.spec.worker
        patience_s = config.drain_notice_s + config.drain_timeout_s - _SETTLE_BEFORE_S
        asyncio.get_running_loop().call_later(max(0.0, patience_s), partial(self._settle, worker))

    def _settle(self, worker: SimWorker) -> None:
        if self._cluster.workers.get(worker.name) is worker:
            self._cluster.settle(worker.name)

    def _free_index(self, home: Role) -> int:
        used = {index for other, index in self._homes.values() if other is home}
        return next(index for index in range(len(used) + 1) if index not in used)


class RoleCount(NamedTuple):
    """Workers of one role: those that serve, and all that hold devices, also as they start or drain."""

    ready: int = 0
    present: int = 0


@dataclass(slots=True)
class ScalingRecord:
    """Times are virtual seconds since the first request was due.

    counts:    workers by role, at each change
    worker_s:  seconds that workers held devices, by the role whose settings they have
    changes:   workers added, retired and flipped
    decisions: rounds that changed something; none without a planner
    rounds:    all rounds of the planner by what came of them
    """

    counts: list[tuple[float, dict[Role, RoleCount]]] = field(default_factory=list)
    worker_s: dict[Role, float] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    decisions: list[tuple[float, DecisionRecord]] = field(default_factory=list)
    rounds: Counter[str] = field(default_factory=Counter)

    @property
    def turns(self) -> int:
        """How often the number of workers that hold devices fell after it rose, or rose after it fell."""
        totals = [sum(count.present for count in counts.values()) for _, counts in self.counts]
        rises = [after > before for before, after in pairwise(totals) if after != before]
        return sum(one != other for one, other in pairwise(rises))

    def mean(self, role: Role, end_s: float) -> float:
        """Give the mean number of ready workers until `end_s`."""
        entries = [*self.counts, (end_s, {})]
        total = sum(
            counts.get(role, RoleCount()).ready * (until_s - at_s)
            for (at_s, counts), (until_s, _) in pairwise(entries)
        )
        return total / end_s if end_s > 0 else 0.0


@dataclass(slots=True)
class Counters:
    """Sums over workers.

    prefix_hit_tokens: cached tokens of admitted prompts, including those transferred from another worker
    received_bytes:    KV received from other workers
    failures:          prompts recomputed after a failed KV transfer, by error code
    expired, refused:  prefill results not fetched in time, or not exported for lack of blocks
    onboarded_tokens:  cached prompt tokens by lower tier, host first; empty without lower tiers
    """

    prefilled_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    received_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    refused: int = 0
    onboarded_tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, workers: Iterable[SimWorker], cluster: SimCluster) -> Self:
        """Add up the counters of `workers`."""
        counters = cls()
        for worker in workers:
            load, kv_transfer = worker.engine.load(), worker.worker.kv_transfer
            counters.prefilled_tokens += load.prefilled_tokens
            counters.prefix_hit_tokens += load.prefix_hit_tokens
            counters.generated_tokens += load.generated_tokens
            counters.preemptions += load.preemptions
            counters.received_bytes += cluster.sim_transports.received_bytes[worker.host]
            if kv_transfer is not None:
                counters.failures.update(kv_transfer.incoming.failures)
                counters.expired += kv_transfer.exports.expired
                counters.refused += kv_transfer.exports.refused
            counters._add_onboarded(load.onboarded_tokens)
        return counters

    def add(self, other: "Counters") -> None:
        """Add the sums over other workers."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures.update(other.failures)
        self._add_onboarded(other.onboarded_tokens)

    def _add_onboarded(self, tokens: Sequence[int]) -> None:
        self.onboarded_tokens = [
            sum(tier) for tier in zip_longest(self.onboarded_tokens, tokens, fillvalue=0)
        ]


_SUMS = tuple(each.name for each in fields(Counters) if each.type in {int, "int"})


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


Controller = Callable[[ScaledCluster], Awaitable[None]]
"""Scales a simulated deployment until it is cancelled."""


def planner_of(deployment: SimDeployment) -> Controller | None:
    """Give the planner of a deployment's graph; None where it has none.

    Raises:
        ConfigError: step times of a role cannot be predicted, or the planner cannot scale the roles.
    """
    config = deployment.graph.planner
    if config is None:
        return None
    capacities = [_capacity(deployment, role_group) for role_group in deployment.role_groups]
    given = deployment.graph.slo or Slo()
    slo = SloTargets(ttft_s=given.ttft_s, itl_s=given.itl_s, percentile=given.percentile)

    async def scale(scaled: ScaledCluster) -> None:
        planner = Planner(
            scaled.connector,
            scaled.observe,
            config=config,
            slo=slo,
            capacities=capacities,
            on_record=scaled.keep,
        )
        await planner.run()

    return scale


def _capacity(deployment: SimDeployment, role_group: RoleGroup) -> Capacity:
    """Predict a role's workers as the router does, from the graph: `--engine-profile` is of the engines alone."""
    graph = deployment.graph
    # What a simulated engine is: its steps have the scheduler's limits, and its KV is known.
    spec = role_group.spec.model_copy(update={"engine": "paged", "kv_blocks": role_group.num_blocks})
    return make_capacity(
        role_group.role,
        spec,
        model_dir=Path(),
        block_size=graph.block_size,
        budget=graph.planner.budget if graph.planner else None,
        shape=deployment.shape,
    )
