"""Replaces workers by others with other templates, while requests go on.

Where both have the same block hashes, one worker after another: a new one starts, and once it is ready an old one drains. Where
the hashes differ, as for another revision of the model, routers send requests to workers of one revision alone: the new workers
start beside the old ones, which then drain all at once.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import PenstockError, Unavailable
from penstock.core.types.instances import Role, Scale
from penstock.core.types.scaling_rules import conflict
from penstock.deploy.supervisor.worker_pool import PoolWorker
from penstock.graph import RoleSpec

BY = "penstock apply"


class RolloutPool(Protocol):
    """Interface of `WorkerPool` that a rollout uses."""

    @property
    def workers(self) -> Sequence[PoolWorker]: ...
    def define(self, roles: Mapping[Role, RoleSpec]) -> None: ...
    def room_of(self, role: Role) -> tuple[int | None, str]: ...
    async def scale(self, after: int | None = None) -> Scale: ...
    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]: ...
    async def retire(
        self, names: Sequence[str], *, by: str, revision: int | None = None, drain_s: float | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Aim:
    """What a role is to become.

    Attributes:
        spec: its settings.
        count: its workers.
        template: the key of what they are started with; workers with another key are outdated.
    """

    spec: RoleSpec
    count: int
    template: str


class Rollout:
    """One rollout. One task runs it."""

    def __init__(
        self,
        pool: RolloutPool,
        aims: Mapping[Role, Aim],
        *,
        is_revision: bool,
        drain_s: float,
        starts_max: int,
        say: Callable[[str], None],
    ) -> None:
        """Change nothing yet.

        Args:
            pool: the workers, of which nobody else changes any meanwhile.
            aims: all roles of this host from now on; workers of others go.
            is_revision: whether block hashes of new workers differ from those of old ones.
            drain_s: how long requests of workers of a former revision may take, which no other worker could go on with.
            starts_max: starts in a row of a new worker that may fail.
            say: called with a line for each step.
        """
        self._pool = pool
        self._aims = dict(aims)
        self._is_revision = is_revision
        self._drain_s = drain_s
        self._starts_max = starts_max
        self._say = say
        self.has_switched = False
        """Whether the former revision's workers were told to go."""
        self._before = {
            role: len(self._active(role)) for role in {worker.home for worker in pool.workers} | aims.keys()
        }

    def check(self) -> None:
        """Check that every role can be changed at all.

        Raises:
            RequestError: the only worker of a role is outdated, and there is no room for another beside it.
        """
        for role, aim in self._aims.items():
            old = self._outdated(role)
            if old and len(old) == len(self._active(role)) == 1 and aim.count and not self._may_surge(role):
                _, why = self._pool.room_of(role)
                raise conflict(
                    f"{role}: {old[0].name} is its only worker, and a new one finds no room beside it ({why}); stop the deployment"
                    " with penstock down and start it again, or make room"
                )

    def order(self, roles: Collection[Role]) -> str:
        """Say in which order the outdated workers of these roles are replaced, by the room that there is now."""
        roles = [role for role in roles if role in self._aims and self._outdated(role)]
        if self._is_revision:
            if all(self._room(role) >= self._aims[role].count - len(self._updated(role)) for role in roles):
                return "beside the old ones, then switch"
            return "where half of the old ones make room first, one by one, then switch"
        if all(self._may_surge(role) or len(self._active(role)) > self._aims[role].count for role in roles):
            return "one after another"
        return "one after another, each old one draining first, as there is no room beside it"

    async def run(self) -> None:
        """Carry it out.

        Raises:
            PenstockError: a new worker does not come up, or the machine lacks room; the old workers that are left stay, and
                those that made room are started again.
        """
        try:
            for role, aim in self._aims.items():
                if not self._before[role]:
                    await self._grow(role, aim.count)
            if self._is_revision and any(self._outdated(role) for role in self._aims):
                await self._switch()
            for role in self._aims:
                await self._roll(role)
            gone = [worker for worker in self._living() if worker.home not in self._aims]
            await self._retire(gone)
            await self._ended(gone)
        except PenstockError:
            await self._give_up()
            raise

    # -- one worker after another

    async def _roll(self, role: Role) -> None:
        """Replace the outdated workers of a role one by one, and have as many as it is to have."""
        aim = self._aims[role]
        await self._grow(role, aim.count)
        while old := self._outdated(role):
            worker = old[-1]
            if len(self._active(role)) > aim.count:
                await self._replace_by_nothing(worker)
            elif self._may_surge(role):
                await self._add(role, 1)
                await self._replace_by_nothing(worker)
            else:
                await self._replace_by_nothing(worker)
                await self._add(role, 1)
        extra = (await self._pool.scale()).to_retire(role, max(0, len(self._active(role)) - aim.count))
        leaving = [worker for worker in self._living() if worker.name in extra]
        await self._retire(leaving)
        await self._ended(leaving)

    async def _grow(self, role: Role, count: int) -> None:
        missing = count - len(self._active(role))
        if missing > 0:
            await self._add(role, missing)

    async def _replace_by_nothing(self, worker: PoolWorker) -> None:
        await self._retire([worker])
        await self._ended([worker])

    # -- another revision

    async def _switch(self) -> None:
        """Start new workers beside the old ones, then drain all old ones at once, and start the rest in their room.

        The old ones make room one by one only until as many new ones are ready.
        """
        for role, aim in self._aims.items():
            while (missing := aim.count - len(self._updated(role))) > 0:
                if self._outdated(role) and len(self._updated(role)) >= len(self._outdated(role)):
                    break
                room = self._room(role)
                if room:
                    await self._add(role, min(room, missing))
                elif len(self._outdated(role)) > 1:
                    await self._replace_by_nothing(self._outdated(role)[-1])
                else:
                    raise conflict(f"{role}: a new worker finds no room: {self._pool.room_of(role)[1]}")
        old = [worker for role in self._aims for worker in self._outdated(role)]
        self.has_switched = True
        self._say(
            f"the new revision takes requests; the former one finishes its own within {self._drain_s:g} s"
        )
        await self._retire(old, drain_s=self._drain_s)
        await self._ended(old)

    # -- steps

    async def _add(self, role: Role, count: int) -> None:
        """Start workers and wait until they are ready.

        Raises:
            Unavailable: one does not come up.
            RequestError: there is no room for them.
        """
        names = await self._pool.add(role, count, by=BY)
        self._say(f"{role}: {', '.join(names)} starts" if count == 1 else f"{role}: {', '.join(names)} start")
        new = [worker for worker in self._living() if worker.name in names]
        scale = await self._pool.scale()
        while not all(worker.running.ready.is_set() for worker in new):
            for worker in new:
                self._check_start(worker)
            scale = await self._pool.scale(scale.sequence)
        self._say(f"{role}: {', '.join(names)} ready")

    def _check_start(self, worker: PoolWorker) -> None:
        member = worker.running
        if worker.is_draining:
            raise Unavailable(f"{worker.name} was stopped while it started")
        if member.has_wrong_config or member.failed_starts >= self._starts_max:
            times = "" if member.failed_starts < 2 else f" in {member.failed_starts} starts"
            raise Unavailable(f"{worker.name} does not come up{times}: {member.phase}")

    async def _retire(self, workers: Sequence[PoolWorker], *, drain_s: float | None = None) -> None:
        if workers:
            names = [worker.name for worker in workers]
            await self._pool.retire(names, by=BY, drain_s=drain_s)
            self._say(f"{', '.join(names)} {'drains' if len(names) == 1 else 'drain'}")

    async def _ended(self, workers: Sequence[PoolWorker]) -> None:
        """Wait until these have ended, and their share of the machine is free."""
        scale = await self._pool.scale()
        while any(worker in workers for worker in self._pool.workers):
            scale = await self._pool.scale(scale.sequence)

    async def _give_up(self) -> None:
        """End new workers that serve nobody, and start old ones again that had made room for them."""
        useless = [
            worker
            for worker in self._living()
            if worker.home in self._aims
            and worker.template == self._aims[worker.home].template
            and (not worker.running.ready.is_set() or (self._is_revision and not self.has_switched))
        ]
        for worker in useless:
            await self._try(self._pool.retire([worker.name], by=BY))
        await self._ended(useless)

    async def restore(self, roles: Collection[Role]) -> None:
        """Have as many workers as before by the former roles, which the pool starts again; after `run` has failed."""
        for role in roles:
            missing = self._before.get(role, 0) - len(self._active(role))
            if missing > 0:
                await self._try(self._pool.add(role, missing, by=BY))

    async def _try(self, change: Awaitable[object]) -> None:
        try:
            await change
        except PenstockError as error:
            self._say(f"cannot go back: {error.message}")

    # -- what there is

    def _living(self) -> list[PoolWorker]:
        return [worker for worker in self._pool.workers if not worker.is_draining]

    def _active(self, role: Role) -> list[PoolWorker]:
        return [worker for worker in self._living() if worker.home is role]

    def _outdated(self, role: Role) -> list[PoolWorker]:
        return [worker for worker in self._active(role) if worker.template != self._aims[role].template]

    def _updated(self, role: Role) -> list[PoolWorker]:
        return [worker for worker in self._active(role) if worker.template == self._aims[role].template]

    def _room(self, role: Role) -> int:
        """Count the new workers that find room beside the old ones. A worker's own files and memory are for one process at a time."""
        spec = self._aims[role].spec
        if spec.kv.host or spec.kv.disk.size:
            return 0
        room, _ = self._pool.room_of(role)
        return self._aims[role].count if room is None else room

    def _may_surge(self, role: Role) -> bool:
        return self._room(role) > 0
