"""The workers of a deployment on this machine: started, drained and flipped while the others serve."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from penstock.core.errors import RequestError, Unavailable, from_info
from penstock.core.log import get_logger
from penstock.core.types.instances import Replica, ReplicaState, Role, RoleLimit, Scale
from penstock.core.types.scaling_rules import check_add, check_flip, check_retire, conflict
from penstock.deploy.control.messages import ProcessView
from penstock.deploy.messages import ChangeRole, WorkerRoleChanged
from penstock.deploy.supervisor.member import ProcessMember
from penstock.deploy.supervisor.resources import Devices, Ports, ProcessCores, computes_here, devices_of
from penstock.deploy.supervisor.scale_file import KeptWorker, ScaleFile, declared_workers
from penstock.engine.registry import engine_kind
from penstock.graph import RoleSpec

WORKER_NAMES = {Role.AGGREGATED: "worker", Role.PREFILL: "prefill", Role.DECODE: "decode"}


@dataclass(slots=True, eq=False)
class PoolWorker:
    """A worker and its share of the machine. The pool owns it."""

    home: Role
    """The role in the graph whose settings it has."""
    index: int
    """Its number among the workers of its home; a number is free again when its processes have ended."""
    role: Role
    """The role that it has now."""
    devices: tuple[int, ...] = ()
    core: int | None = None
    ports: tuple[int, ...] = ()
    """Where it listens for requests and for KV transfers; none for any free ports."""
    target: Role | None = None
    """The role that it is to get; None while it does not change."""
    flips: set["asyncio.Future[None]"] = field(default_factory=set)
    """Callers that wait for the change of role."""
    member: ProcessMember | None = None
    template: str = ""
    """Key of the template by which its processes are started."""

    @property
    def name(self) -> str:
        return f"{WORKER_NAMES[self.home]}-{self.index + 1}"

    @property
    def running(self) -> ProcessMember:
        assert self.member is not None, "in the pool"
        return self.member

    @property
    def is_draining(self) -> bool:
        return self.running.is_stopping

    @property
    def answers(self) -> bool:
        """Whether requests may be sent to it once it is ready."""
        return not self.is_draining and Role.PREFILL not in {self.role, self.target}

    @property
    def is_serving(self) -> bool:
        """Whether it answers requests now."""
        return self.answers and self.target is None and self.running.ready.is_set()

    def replica(self, now_s: float) -> Replica:
        """Describe it at loop time `now_s`."""
        member = self.running
        return Replica(
            name=self.name,
            role=self.target or self.role,
            state=self._state(),
            phase=f"becomes {self.target}, was {self.role}" if self.target is not None else member.phase,
            age_s=member.age_s(now_s),
            devices=self.devices,
            core=self.core,
            template=self.template,
        )

    def _state(self) -> ReplicaState:
        state = self.running.state
        return ReplicaState.FLIPPING if state is ReplicaState.READY and self.target is not None else state


def check_prefill(
    workers: Sequence[PoolWorker], leaving: Sequence[PoolWorker], elsewhere: frozenset[Role] = frozenset()
) -> None:
    """Check that decode workers that compute no prompts themselves keep a prefill worker; raises RequestError (409)."""
    if Role.PREFILL in elsewhere:
        return
    prefill = [
        worker
        for worker in workers
        if worker.role is Role.PREFILL and worker.target is None and not worker.is_draining
    ]
    ready = [worker for worker in prefill if worker.running.ready.is_set()]
    needed = any(
        worker.role is Role.DECODE
        and worker.answers
        and worker.running.needs_prefill
        and worker not in leaving
        for worker in workers
    )
    if needed and any(worker in leaving for worker in ready) and all(worker in leaving for worker in ready):
        raise conflict(
            f"{ready[0].name} is the last prefill worker that is ready, and decode workers of its engine compute no prompts;"
            " add another and wait until it is ready"
        )


def check_adapters(
    roles: Mapping[Role, RoleSpec],
    workers: Sequence[PoolWorker],
    leaving: Sequence[PoolWorker],
    elsewhere: frozenset[Role] = frozenset(),
) -> None:
    """Check that every adapter still has a worker; raises RequestError (409)."""
    for role, spec in roles.items():
        if role in elsewhere and spec.adapters_per_worker is None:
            continue  # each worker of the role has them all
        own = [worker for worker in workers if worker.home is role and not worker.is_draining]
        left = {name for worker in own if worker not in leaving for name in spec.adapters_of(worker.index)}
        lost = {name for worker in own for name in spec.adapters_of(worker.index)} - left
        if lost:
            raise conflict(
                f"no other worker has adapter {min(lost)!r} (roles.{role}.adapters_per_worker); retire another worker"
            )


WAIT_S_MAX = 20.0
"""Longest time that `scale(after)` waits for a change."""
_ROLE_COMMAND = "penstock role"
_log = get_logger()


class WorkerCapacity:
    """How many more workers of each role one machine can hold, and the GPUs, cores and ports that workers have."""

    def __init__(
        self, devices: Devices, cores: ProcessCores, workers_max: int, ports: Ports | None = None
    ) -> None:
        """Make the bounds.

        Args:
            devices: GPUs.
            cores: CPU cores of engines.
            workers_max: most workers that a router knows.
            ports: where workers listen; None for any free ports.
        """
        self.devices = devices
        self.cores = cores
        self.ports = Ports(None) if ports is None else ports
        self._workers_max = workers_max
        self._num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    def give(self, worker: PoolWorker, spec: RoleSpec) -> None:
        """Give a worker its GPUs, its core and its ports.

        Raises:
            RequestError: they are not free (409).
        """
        worker.devices = self.devices.take(worker.name, devices_of(spec))
        worker.core = self.cores.take(worker.name, worker.home, spec)
        worker.ports = self.ports.take(worker.name)

    def release(self, worker: PoolWorker) -> None:
        """Free a worker's share, once its processes have ended."""
        for share in (self.devices, self.cores, self.ports):
            share.release(worker.name)

    def of(self, role: Role, spec: RoleSpec, workers: Sequence[PoolWorker]) -> tuple[int | None, str]:
        """Give (workers that may be added, what stops more); None without a known limit.

        Args:
            role: the role to grow.
            spec: its settings.
            workers: all workers of the pool; one that drains keeps its share of the machine until it has ended.
        """
        own = [worker for worker in workers if worker.home is role]
        bounds: list[tuple[int | None, str]] = [
            (
                self._workers_max - len(workers),
                f"a router knows at most {self._workers_max:,} workers (router.workers_max)",
            ),
            (
                self.devices.room(devices_of(spec)),
                f"each needs {self.devices.describe_lack(devices_of(spec))}",
            ),
            (self.cores.room(spec), f"each needs {self.cores.describe_lack()}"),
            self._declared(role, spec, len(own)),
        ]
        if (ports := self.ports.room()) is not None:
            bounds.append((ports, f"each needs {self.ports.describe_lack()}"))
        known = [(room, why) for room, why in bounds if room is not None]
        room, why = min(known, key=lambda bound: bound[0])
        return max(0, room), why

    def _declared(self, role: Role, spec: RoleSpec, count: int) -> tuple[int | None, str]:
        """Bound a role's own workers, of which there are `count`."""
        counter = engine_kind(spec.engine).count_workers
        if counter is not None and (most := counter(spec.engine_args)) is not None:
            return most - count, f"engine {spec.engine!r} has one worker for each url, {most}; add urls"
        if spec.nodes > 1:
            return 1 - count, (
                f"a worker has {spec.nodes} nodes and this host leads one; run penstock up --leader on another host"
            )
        if spec.replicas_max is not None:
            return (
                spec.replicas_max - count,
                f"roles.{role}.replicas_max is {spec.replicas_max}; raise it and start again",
            )
        if spec.kv.host:
            return spec.replicas - count, (
                f"kv.host is shared by the {spec.replicas} workers of the start; set roles.{role}.replicas_max and start again"
            )
        if computes_here(spec):
            most = max(spec.replicas, self._num_cpus)
            return most - count, (
                f"{most} workers compute on {self._num_cpus} cores; set roles.{role}.replicas_max for more, and start again"
            )
        return None, ""


class LocalWorkerPool:
    """A `seams.ScalingConnector` of the machine's own processes. One event loop owns it."""

    def __init__(self, roles: Mapping[Role, RoleSpec], *, room: WorkerCapacity, drain_s: float) -> None:
        """Make an empty pool; `fill` and `start` begin.

        Args:
            roles: the graph's roles.
            room: the machine's devices and bounds.
            drain_s: seconds that a worker may take to drain and close; then it is killed.
        """
        self._roles = dict(roles)
        self._room = room
        self._make: Callable[[PoolWorker], ProcessMember]
        self._file: ScaleFile | None = None
        self.drain_s = drain_s
        self._workers: list[PoolWorker] = []
        self._tasks: dict[PoolWorker, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._is_open = False
        self._sequence = 0
        self._revision = 0
        self._changed_by = ""
        self._start_s: dict[Role, float] = {}
        self._held_by = ""
        """Who changes the workers step by step; others may not meanwhile."""
        self._waiting: set[asyncio.Future[None]] = set()
        self.on_end: Callable[[str], None] = lambda _name: None
        """Called with the name of a worker that was retired and has ended."""

    @property
    def workers(self) -> tuple[PoolWorker, ...]:
        """All workers, those that drain included."""
        return tuple(self._workers)

    @property
    def members(self) -> list[ProcessMember]:
        return [worker.running for worker in self._workers]

    def processes(self) -> Sequence[ProcessView]:
        """Describe the workers' processes."""
        now_s = asyncio.get_running_loop().time()
        return [ProcessView.of(worker.replica(now_s), worker.running.pid) for worker in self._workers]

    # -- life

    def fill(self, make: Callable[[PoolWorker], ProcessMember], file: ScaleFile | None = None) -> str:
        """Add the workers of the file, else those of the graph; returns what differs from the graph, to be printed.

        Args:
            make: makes the member that runs a worker's process.
            file: remembers the workers; None remembers nothing.

        Raises:
            RequestError: this machine lacks devices or cores for them.
        """
        self._make, self._file = make, file
        kept = None if file is None else file.load()
        declared = declared_workers(self._roles)
        if kept is not None:
            try:
                self._place(kept.workers)
            except RequestError as error:
                _log.warning("scale_not_restored", error=error.message, effect="starts as the graph says")
            else:
                self._revision, self._changed_by = kept.revision, kept.changed_by
                return "" if kept.workers == declared else self._describe_restored()
        self._place(declared)
        return ""

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the processes of all workers in `group`."""
        self._group = group
        for worker in self._workers:
            self._run(worker)

    async def started(self) -> None:
        """Wait until each role has a ready worker, and every other worker is ready or waits for a running server."""
        while not self._has_started():
            await self._change()

    def _has_started(self) -> bool:
        settled = all(member.ready.is_set() or member.waits_outside for member in self.members)
        serving = {worker.home for worker in self._workers if worker.running.ready.is_set()}
        return settled and serving == {worker.home for worker in self._workers}

    def open(self) -> None:
        """Accept changes from now on: the deployment has started."""
        self._is_open = True

    async def drain(self) -> None:
        """End all workers: drain, then kill those that take too long. No change is accepted any more."""
        self._is_open = False
        for worker in self._workers:
            worker.running.stop()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks.values()), timeout=self.drain_s)
        for worker in self._workers:
            worker.running.kill()

    async def close(self) -> None:
        """Wake everybody who waits for a change."""
        self._note_change()

    # -- rollout

    def hold(self, by: str) -> None:
        """Refuse changes by others, and keep no change in the file, until `let_go`."""
        self._held_by = by

    def let_go(self) -> None:
        """Accept changes by others again, and keep the workers as they are now."""
        self._held_by = ""
        self._save()

    def define(self, roles: Mapping[Role, RoleSpec]) -> None:
        """Start workers by these roles from now on; those that run keep what they were started with."""
        self._roles = dict(roles)
        self._note_change()

    def room_of(self, role: Role) -> tuple[int | None, str]:
        """Give how many workers may be added to a role, None without a known limit, and what stops more."""
        return self._room.of(role, self._roles[role], self._workers)

    # -- ScalingConnector

    async def scale(self, after: int | None = None) -> Scale:
        if after is not None and after >= self._sequence:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S_MAX):
                    await self._change()
        return self._scale()

    def _scale(self) -> Scale:
        now_s = asyncio.get_running_loop().time()
        return Scale(
            sequence=self._sequence,
            revision=self._revision,
            changed_by=self._changed_by,
            replicas=tuple(worker.replica(now_s) for worker in self._workers),
            limits=tuple(self._limit(role) for role in self._roles),
        )

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]:
        self._check(by)
        check_add(self._scale(), role, count, revision=revision)
        numbers = iter(range(len(self._workers) + count))
        used = {worker.index for worker in self._workers if worker.home is role}
        free = [index for index in numbers if index not in used][:count]
        added = self._place(tuple(KeptWorker(home=role, index=index, role=role) for index in free))
        for worker in added:
            self._run(worker)
        self._accept(by, "workers_added", names=[worker.name for worker in added])
        return tuple(worker.name for worker in added)

    async def retire(
        self,
        names: Sequence[str],
        *,
        by: str,
        revision: int | None = None,
        drain_s: float | None = None,
        elsewhere: frozenset[Role] = frozenset(),
    ) -> None:
        """Retire workers, as `ScalingConnector` and `hosts.Host` say; their requests may take `drain_s`, None is what the graph says."""
        self._check(by)
        replicas = check_retire(self._scale(), names, revision=revision, elsewhere=elsewhere)
        leaving = [self._find(replica.name) for replica in replicas]
        check_prefill(self._workers, leaving, elsewhere)
        check_adapters(self._roles, self._workers, leaving, elsewhere)
        loop = asyncio.get_running_loop()
        for worker in leaving:
            worker.running.stop(drain_s)
            loop.call_later(self.drain_s + (drain_s or 0.0), worker.running.kill)
        if leaving:
            self._accept(by, "workers_retired", names=[worker.name for worker in leaving])

    async def flip(
        self,
        name: str,
        role: Role,
        *,
        by: str,
        revision: int | None = None,
        elsewhere: frozenset[Role] = frozenset(),
    ) -> None:
        self._check(by)
        check_flip(self._scale(), name, role, revision=revision, elsewhere=elsewhere)
        worker = self._find(name)
        if role is not Role.PREFILL:
            check_prefill(self._workers, [worker], elsewhere)
        worker.target = role
        flipped = asyncio.get_running_loop().create_future()
        worker.flips.add(flipped)
        self._accept(by, "worker_flips", name=name, role=role)
        worker.running.tell(ChangeRole(role=role))
        try:
            async with asyncio.timeout(self.drain_s):
                await flipped
        except TimeoutError as error:
            raise Unavailable(
                f"{name} has not become {role} within {self.drain_s:g} s; it may still do so"
            ) from error
        finally:
            worker.flips.discard(flipped)

    # -- changes

    def crash(self, name: str) -> None:
        """Kill a worker's process, which is started again.

        Raises:
            RequestError: there is no such worker.
        """
        self._find(name).running.crash()

    def _place(self, places: Sequence[KeptWorker]) -> list[PoolWorker]:
        """Give workers their share of the machine and add them to the pool, all or none."""
        added: list[PoolWorker] = []
        try:
            for place in places:
                worker = PoolWorker(home=place.home, index=place.index, role=place.role)
                added.append(worker)
                self._room.give(worker, self._roles[place.home])
        except RequestError:
            for worker in added:
                self._release(worker)
            raise
        for worker in added:
            worker.member = self._make(worker)
            self._hear(worker, worker.member)
        self._workers += added
        return added

    def _hear(self, worker: PoolWorker, member: ProcessMember) -> None:
        """Call the pool's methods at the member's changes, beside whatever else is called at them."""
        on_ready, on_failure = member.on_ready, member.on_failure

        def ready() -> None:
            if member.start_s is not None:
                self._start_s[worker.home] = member.start_s
            on_ready()

        def failed(name: str, reason: str) -> None:
            on_failure(name, reason)
            self._end_flip(
                worker, Unavailable(f"{name} ended while it became {worker.target}: {member.phase}")
            )

        member.on_ready, member.on_failure = ready, failed
        member.may_give_up = self._nobody_serves
        member.may_refuse = partial(self._may_refuse, worker)
        member.on_change = self._note_change
        member.on_role = lambda changed: self._note_role(worker, changed)

    def _may_refuse(self, worker: PoolWorker) -> bool:
        """Tell whether a config error of a worker ends the deployment. A wrong server does not where its role has others."""
        if worker.running.has_wrong_server and not all(
            each.running.has_wrong_server for each in self._workers if each.home is worker.home
        ):
            return False
        return not self._is_open or self._nobody_serves()

    def _nobody_serves(self) -> bool:
        return not any(member.ready.is_set() for member in self.members)

    def _run(self, worker: PoolWorker) -> None:
        if self._group is not None:
            self._tasks[worker] = self._group.create_task(self._keep(worker), name=worker.name)

    async def _keep(self, worker: PoolWorker) -> None:
        """Run a worker until it is retired, then free its share of the machine."""
        try:
            await worker.running.run()
        finally:
            self._end_flip(worker, Unavailable(f"{worker.name} has ended"))
            self._tasks.pop(worker, None)
            if self._is_open:
                self._workers.remove(worker)
                self._release(worker)
                self._note_change()
                self.on_end(worker.name)

    def _release(self, worker: PoolWorker) -> None:
        self._room.release(worker)

    def _note_role(self, worker: PoolWorker, changed: WorkerRoleChanged) -> None:
        """Handle a worker's answer to `ChangeRole`, or a change that somebody asked of the worker itself."""
        if changed.problem is not None:
            self._end_flip(worker, from_info(changed.problem))
            return
        was_asked, worker.role = worker.target is not None, changed.role
        self._end_flip(worker, None)
        if was_asked:
            self._save()
        else:
            self._accept(_ROLE_COMMAND, "worker_flipped", name=worker.name, role=changed.role)

    def _end_flip(self, worker: PoolWorker, error: Exception | None) -> None:
        worker.target = None
        for flipped in worker.flips:
            if flipped.done():
                continue
            if error is None:
                flipped.set_result(None)
            else:
                flipped.set_exception(error)
        self._note_change()

    def _accept(self, by: str, event: str, **values: object) -> None:
        self._revision += 1
        self._changed_by = by
        _log.info(event, by=by, revision=self._revision, **values)
        self._save()
        self._note_change()

    def _save(self) -> None:
        if self._file is not None and not self._held_by:
            kept = tuple(
                KeptWorker(home=worker.home, index=worker.index, role=worker.role)
                for worker in self._workers
                if not worker.is_draining
            )
            self._file.save(kept, revision=self._revision, changed_by=self._changed_by)

    async def _change(self) -> None:
        """Wait for the next change."""
        changed = asyncio.get_running_loop().create_future()
        self._waiting.add(changed)
        try:
            await changed
        finally:
            self._waiting.discard(changed)

    def _note_change(self) -> None:
        self._sequence += 1
        for changed in self._waiting:
            if not changed.done():
                changed.set_result(None)

    # -- checks

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent; for tests."""
        self._room.devices.check()
        names = [worker.name for worker in self._workers]
        assert len(set(names)) == len(names), f"a name twice: {names}"
        given = [device for worker in self._workers for device in worker.devices]
        assert len(set(given)) == len(given), f"a device twice: {given}"
        for worker in self._workers:
            assert len(worker.devices) == devices_of(self._roles[worker.home]), worker.name
            assert worker.target is not None or not worker.flips, f"{worker.name}: callers wait for no flip"

    def _check(self, by: str) -> None:
        if not self._is_open:
            raise Unavailable("the deployment is about to start or to stop; try again once it is ready")
        if self._held_by and by != self._held_by:
            raise conflict(f"{self._held_by} is under way; wait until it has ended")

    def _find(self, name: str) -> PoolWorker:
        with suppress(StopIteration):
            return next(worker for worker in self._workers if worker.name == name)
        known = ", ".join(worker.name for worker in self._workers)
        raise RequestError(f"there is no worker {name!r} here; known: {known}", http_status=404)

    def _limit(self, role: Role) -> RoleLimit:
        room, why = self._room.of(role, self._roles[role], self._workers)
        return RoleLimit(role=role, room=room, why=why, start_s=self._start_s.get(role))

    def _describe_restored(self) -> str:
        counts = {role: sum(worker.role is role for worker in self._workers) for role in Role}
        listed = ", ".join(f"{count} {role}" for role, count in counts.items() if count)
        return f"{listed}: set by {self._changed_by} before the restart; penstock scale ROLE N changes it"
