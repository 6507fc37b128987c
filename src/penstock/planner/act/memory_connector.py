"""A deployment in memory, for simulations and tests: keeps the book of workers, whose changes somebody else makes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.core.errors import PenstockError, RequestError, Unavailable
from penstock.core.types.instances import Replica, ReplicaState, Role, RoleLimit, Scale
from penstock.planner.act.worker_changes import Done, TimedChanges, WorkerChanges

_WAIT_S_MAX = 20.0


@dataclass(slots=True)
class _Worker:
    name: str
    role: Role
    state: ReplicaState
    since: float


class MemoryConnector:
    """A `seams.ScalingConnector` without processes. Event-loop time is its clock; one event loop owns it."""

    def __init__(
        self, replicas: Mapping[Role, int], *, workers_max: int = 1024, changes: WorkerChanges | None = None
    ) -> None:
        """Make a deployment whose workers are ready.

        Args:
            replicas: workers of each of its roles; a role with 0 may get some later.
            workers_max: most workers of all roles together, those that drain included.
            changes: makes the workers' changes; None: `TimedChanges`, of workers that serve nothing.
        """
        self.on_state: Callable[[Replica], None] = lambda _replica: None
        """Called with each worker whose state or role has changed; one that has ended is DRAINING then, and gone."""
        self._changes = changes or TimedChanges()
        self._workers_max = workers_max
        self._roles = tuple(replicas)
        self._workers: dict[str, _Worker] = {}
        self._sequence = 0
        self._revision = 0
        self._changed_by = ""
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_closed = False
        for role, count in replicas.items():
            for _ in range(count):
                self._put(role, ReplicaState.READY, 0.0)

    @property
    def workers(self) -> tuple[Replica, ...]:
        """The workers as they are now."""
        now_s = asyncio.get_running_loop().time()
        return tuple(self._describe(worker, now_s) for worker in self._workers.values())

    async def scale(self, after: int | None = None) -> Scale:
        self._check(None)
        loop = asyncio.get_running_loop()
        if after is not None and after >= self._sequence:
            changed = loop.create_future()
            self._waiting.add(changed)
            await asyncio.wait([changed], timeout=_WAIT_S_MAX)
            self._waiting.discard(changed)
        room = self._workers_max - len(self._workers)
        why = f"at most {self._workers_max} workers, all roles together"
        return Scale(
            sequence=self._sequence,
            revision=self._revision,
            changed_by=self._changed_by,
            replicas=self.workers,
            limits=tuple(
                RoleLimit(role=role, room=room, why=why, start_s=self._changes.start_s(role))
                for role in self._roles
            ),
        )

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]:
        self._check(revision)
        if role not in self._roles:
            raise RequestError(
                f"role {role} is not of this deployment, which has {', '.join(self._roles)}", http_status=404
            )
        if count < 1:
            raise RequestError(f"count: must be >= 1, got {count}")
        room = self._workers_max - len(self._workers)
        if count > room:
            raise _conflict(
                f"{role}: {count} more cannot be added, {room} can: at most {self._workers_max} workers"
            )
        loop = asyncio.get_running_loop()
        added = [self._put(role, ReplicaState.STARTING, loop.time()) for _ in range(count)]
        for worker in added:
            self._changes.start(worker.name, role, self._started(worker, ReplicaState.STARTING))
            self.on_state(self._describe(worker, loop.time()))
        self._accept(by)
        return tuple(worker.name for worker in added)

    async def retire(self, names: Sequence[str], *, by: str, revision: int | None = None) -> None:
        self._check(revision)
        leaving = [self._find(name) for name in dict.fromkeys(names)]
        for worker in leaving:
            if worker.state is ReplicaState.DRAINING:
                raise _conflict(f"{worker.name} drains already")
        self._check_serving(leaving)
        for worker in leaving:
            was_ready = worker.state in {ReplicaState.READY, ReplicaState.FLIPPING}
            self._become(worker, worker.state, ReplicaState.DRAINING)
            begin = self._changes.drain if was_ready else self._changes.stop
            begin(worker.name, self._left(worker))
        if leaving:
            self._accept(by)

    async def flip(self, name: str, role: Role, *, by: str, revision: int | None = None) -> None:
        self._check(revision)
        worker = self._find(name)
        if worker.state is not ReplicaState.READY:
            raise _conflict(f"{name} is not ready: {worker.state}")
        if worker.role is role:
            raise _conflict(f"{name} is {role} already")
        if role is Role.PREFILL:
            self._check_serving([worker])
        before, worker.role = worker.role, role
        self._become(worker, ReplicaState.READY, ReplicaState.FLIPPING)
        self._accept(by)
        flipped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.flip(name, role, partial(self._flipped, worker, before, flipped))
        await flipped

    async def close(self) -> None:
        self._is_closed = True
        self._note_change()

    def fail(self, name: str) -> None:
        """Let a worker fail; it starts again."""
        worker = self._find(name)
        self._become(worker, worker.state, ReplicaState.FAILED)
        self._changes.start(name, worker.role, self._started(worker, ReplicaState.FAILED))

    def end(self, name: str) -> None:
        """End a worker that drains."""
        worker = self._find(name)
        if not _drains(worker):
            raise _conflict(f"{name} does not drain: {worker.state}")
        self._end(worker)

    def _put(self, role: Role, state: ReplicaState, now_s: float) -> _Worker:
        number = next(n for n in range(1, len(self._workers) + 2) if f"{role}-{n}" not in self._workers)
        worker = _Worker(f"{role}-{number}", role, state, now_s)
        self._workers[worker.name] = worker
        return worker

    def _become(self, worker: _Worker, before: ReplicaState, state: ReplicaState) -> None:
        """Change a worker's state, unless it is no longer in the one `before`."""
        if worker.state is before and self._workers.get(worker.name) is worker:
            worker.state, worker.since = state, asyncio.get_running_loop().time()
            self._note_change()
            self.on_state(self._describe(worker, worker.since))

    def _started(self, worker: _Worker, before: ReplicaState) -> Done:
        return lambda _: self._become(worker, before, ReplicaState.READY)

    def _flipped(
        self, worker: _Worker, before: Role, flipped: asyncio.Future[None], error: PenstockError | None
    ) -> None:
        """End a flip, also if its caller waits no longer."""
        name, role = worker.name, worker.role
        if self._workers.get(name) is not worker or worker.state is not ReplicaState.FLIPPING:
            error = error or Unavailable(f"{name} has ended while it became {role}")
        else:
            worker.role = before if error else role
            self._become(worker, ReplicaState.FLIPPING, ReplicaState.READY)
        if flipped.done():
            return
        if error is None:
            flipped.set_result(None)
        else:
            flipped.set_exception(error)

    def _left(self, worker: _Worker) -> Done:
        return lambda _: self._end(worker)

    def _end(self, worker: _Worker) -> None:
        if self._workers.get(worker.name) is not worker:
            return
        self._workers.pop(worker.name, None)
        self._note_change()
        self.on_state(self._describe(worker, worker.since))

    def _describe(self, worker: _Worker, now_s: float) -> Replica:
        return Replica(
            name=worker.name, role=worker.role, state=worker.state, age_s=max(0.0, now_s - worker.since)
        )

    def _accept(self, by: str) -> None:
        self._revision += 1
        self._changed_by = by
        self._note_change()

    def _note_change(self) -> None:
        self._sequence += 1
        for changed in self._waiting:
            if not changed.done():
                changed.set_result(None)

    def _check(self, revision: int | None) -> None:
        if self._is_closed:
            raise Unavailable("the deployment has ended")
        if revision is not None and revision != self._revision:
            raise _conflict(
                f"revision: {self._changed_by or 'somebody'} has scaled meanwhile (revision {self._revision}, expected"
                f" {revision}); look again and repeat"
            )

    def _find(self, name: str) -> _Worker:
        if name not in self._workers:
            raise RequestError(
                f"there is no worker {name!r} here; known: {', '.join(self._workers)}", http_status=404
            )
        return self._workers[name]

    def _check_serving(self, leaving: Sequence[_Worker]) -> None:
        serving = [
            worker
            for worker in self._workers.values()
            if worker.role is not Role.PREFILL and worker.state is ReplicaState.READY
        ]
        if any(worker in leaving for worker in serving) and all(worker in leaving for worker in serving):
            raise _conflict(f"{serving[0].name} is the last worker that answers requests; add another first")


def _drains(worker: _Worker) -> bool:
    return worker.state is ReplicaState.DRAINING


def _conflict(message: str) -> RequestError:
    return RequestError(message, http_status=409)
