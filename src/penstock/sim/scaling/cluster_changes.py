"""Starts, drains and flips the workers of a simulated cluster, as a supervisor does with processes."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from penstock.core.errors import PenstockError
from penstock.core.types.instances import BecomeRole, Role
from penstock.planner.act.worker_changes import Done
from penstock.sim.world.cluster import SimCluster, SimWorker

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
