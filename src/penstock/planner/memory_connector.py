"""A deployment in memory, for simulations and tests: keeps the book of workers, whose changes somebody else makes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.core.errors import PenstockError, Unavailable
from penstock.core.types.instances import Replica, ReplicaState, Role, RoleLimit, Scale
from penstock.core.types.scaling_rules import check_add, check_flip, check_retire, conflict, find_replica

Done = Callable[[PenstockError | None], None]
"""Called once a change has ended, with why it was not made; None if it was."""


class ReplicaChanges(Protocol):
    """Makes the changes of workers. Every method begins a change and returns at once."""

    def start_s(self, role: Role) -> float | None:
        """Give the seconds that a start takes; None if none is known yet."""
        ...

    def start(self, name: str, role: Role, done: Done) -> None:
        """Start a worker, or one that has failed again. `done` is never called for one that does not become ready."""
        ...

    def stop(self, name: str, done: Done) -> None:
        """End a worker that is not ready."""
        ...

    def drain(self, name: str, done: Done) -> None:
        """End a worker that serves, once its requests have finished or moved."""
        ...

    def flip(self, name: str, role: Role, done: Done) -> None:
        """Change a worker's role."""
        ...


@dataclass(slots=True, frozen=True)
class TimedChanges:
    """Changes of workers that serve nothing: each takes so many seconds."""

    starts_s: float = 20.0
    drains_s: float | None = 1.0
    """None: a worker drains until `MemoryConnector.end`."""
    flips_s: float = 0.1

    def start_s(self, role: Role) -> float:
        del role
        return self.starts_s

    def start(self, name: str, role: Role, done: Done) -> None:
        del name, role
        _later(self.starts_s, done)

    def stop(self, name: str, done: Done) -> None:
        del name
        _later(0.0, done)

    def drain(self, name: str, done: Done) -> None:
        del name
        if self.drains_s is not None:
            _later(self.drains_s, done)

    def flip(self, name: str, role: Role, done: Done) -> None:
        del name, role
        _later(self.flips_s, done)


def _later(seconds: float, done: Done) -> None:
    asyncio.get_running_loop().call_later(seconds, done, None)


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
        self, replicas: Mapping[Role, int], *, workers_max: int = 1024, changes: ReplicaChanges | None = None
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
        self._check_open()
        if after is not None and after >= self._sequence:
            changed = asyncio.get_running_loop().create_future()
            self._waiting.add(changed)
            await asyncio.wait([changed], timeout=_WAIT_S_MAX)
            self._waiting.discard(changed)
        return self._scale()

    def _scale(self) -> Scale:
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
        self._check_open()
        check_add(self._scale(), role, count, revision=revision)
        loop = asyncio.get_running_loop()
        added = [self._put(role, ReplicaState.STARTING, loop.time()) for _ in range(count)]
        for worker in added:
            self._changes.start(worker.name, role, self._started(worker, ReplicaState.STARTING))
            self.on_state(self._describe(worker, loop.time()))
        self._accept(by)
        return tuple(worker.name for worker in added)

    async def retire(self, names: Sequence[str], *, by: str, revision: int | None = None) -> None:
        self._check_open()
        leaving = [
            self._workers[replica.name] for replica in check_retire(self._scale(), names, revision=revision)
        ]
        for worker in leaving:
            was_ready = worker.state in {ReplicaState.READY, ReplicaState.FLIPPING}
            self._become(worker, worker.state, ReplicaState.DRAINING)
            begin = self._changes.drain if was_ready else self._changes.stop
            begin(worker.name, self._left(worker))
        if leaving:
            self._accept(by)

    async def flip(self, name: str, role: Role, *, by: str, revision: int | None = None) -> None:
        self._check_open()
        check_flip(self._scale(), name, role, revision=revision)
        worker = self._workers[name]
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
        if worker.state is not ReplicaState.DRAINING:
            raise conflict(f"{name} does not drain: {worker.state}")
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

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("the deployment has ended")

    def _find(self, name: str) -> _Worker:
        return self._workers[find_replica(self._scale(), name).name]
