"""Carries out what a planner decides, and gives way to everybody else who scales."""

import asyncio
import math
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations

from penstock.core.errors import PenstockError
from penstock.core.log import get_logger
from penstock.core.types.instances import Replica, ReplicaState, Role, RoleLimit, Scale
from penstock.seams import ScalingConnector

_RETIRE_FIRST = {ReplicaState.FAILED: 0, ReplicaState.STARTING: 1}


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """Changes in the order in which they are made: flips take a fraction of a second, starts seconds to minutes.

    `late` are workers that serve and are retired once workers of other roles that start are ready; they are planned anew
    then. So are `late_flips`: (worker, role) of the last ready worker of a role, which others of its role wait to follow.
    `later_adds` are workers of roles that wait before they start any.
    """

    flips: tuple[tuple[str, Role], ...] = ()
    adds: Mapping[Role, int] = field(default_factory=dict)
    retires: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    late_flips: tuple[tuple[str, Role], ...] = ()
    later_adds: Mapping[Role, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.flips or self.adds or self.retires)


def make_plan(
    scale: Scale,
    target: Mapping[Role, int],
    *,
    load: Mapping[str, float] | None = None,
    overdue: Collection[str] = (),
    rigid: Collection[tuple[Role, Role]] = (),
    waiting: Collection[Role] = (),
) -> ScalingPlan:
    """Plan the fewest changes to `target`.

    Args:
        scale: the workers as they are. Those that start or flip count for the role that they get.
        target: workers wanted of each role; roles that it does not name stay as they are.
        load: work of each worker, in any unit; the least loaded are flipped and retired first. Unknown is none.
        overdue: workers that do not count, as they have not become ready in time; those of the roles in `target` are replaced
            and retired.
        rigid: (from, to) roles that workers cannot change between.
        waiting: roles that start no worker yet, as their starts have failed.
    """
    work = load or {}
    have = {role: [each for each in scale.of(role) if each.name not in overdue] for role in target}
    surplus = {role: max(0, len(have[role]) - count) for role, count in target.items()}
    lack = {role: max(0, count - len(have[role])) for role, count in target.items()}
    flips: list[tuple[str, Role]] = []
    late_flips: list[tuple[str, Role]] = []
    gone: set[str] = set(overdue)
    for source in target:
        ready = [each for each in have[source] if each.state is ReplicaState.READY]
        ready.sort(key=lambda replica: (work.get(replica.name, 0.0), replica.name))
        for to in target:
            while ready and surplus[source] and lack[to] and (source, to) not in rigid:
                (late_flips if target[source] and len(ready) == 1 else flips).append((ready[0].name, to))
                gone.add(ready.pop(0).name)
                surplus[source] -= 1
                lack[to] -= 1
    adds = {role: count for role, count in lack.items() if count and role not in waiting}
    later_adds = {role: count for role, count in lack.items() if count and role in waiting}
    retires = [
        replica.name for role in target for replica in _to_retire(have[role], surplus[role], gone, work)
    ]
    present = {replica.name for role in target for replica in scale.of(role)}
    replaced = tuple(name for name in overdue if name in present)
    is_starting = any(
        replica.state is ReplicaState.STARTING
        for role in target
        if not surplus[role]
        for replica in have[role]
    )
    if _lacks_room(scale, adds) or not (adds or later_adds or is_starting):
        return ScalingPlan(
            flips=tuple(flips),
            adds=adds,
            retires=(*replaced, *retires),
            late_flips=tuple(late_flips),
            later_adds=later_adds,
        )
    serving = {
        replica.name for role in target for replica in have[role] if replica.state is ReplicaState.READY
    }
    return ScalingPlan(
        flips=tuple(flips),
        adds=adds,
        retires=(*replaced, *(name for name in retires if name not in serving)),
        late=tuple(name for name in retires if name in serving),
        late_flips=tuple(late_flips),
        later_adds=later_adds,
    )


def _to_retire(
    have: list[Replica], count: int, gone: Collection[str], work: Mapping[str, float]
) -> list[Replica]:
    """Choose the workers whose end costs least: failed ones, starting ones, then the least loaded."""
    left = [
        replica for replica in have if replica.name not in gone and replica.state is not ReplicaState.FLIPPING
    ]
    left.sort(
        key=lambda replica: (
            _RETIRE_FIRST.get(replica.state, 2),
            work.get(replica.name, 0.0),
            replica.age_s,
            replica.name,
        )
    )
    return left[:count]


def _lacks_room(scale: Scale, adds: Mapping[Role, int]) -> bool:
    """Tell whether some role finds no room for what is added: then retired workers have to make it first."""
    rooms = {limit.role: limit.room for limit in scale.limits}
    return any((room := rooms.get(role)) is not None and room < count for role, count in adds.items())


@dataclass(slots=True)
class _Failures:
    """Failed starts of one role in a row; the last one was noticed at `noticed_s`."""

    count: int
    noticed_s: float
    until_s: float


class StartBackoff:
    """Doubles the wait with each failed start of a role in a row; a start that succeeds ends it.

    The first failure is made up for at once, as it may be chance; after the n-th one the role waits 2^(n-2) times its deadline.
    One task owns it; times are seconds of the caller's clock.
    """

    def __init__(self, *, wait_s_max: float) -> None:
        """Wait `wait_s_max` at most."""
        self._wait_s_max = wait_s_max
        self._failures: dict[Role, _Failures] = {}

    def note_failure(self, role: Role, *, begun_s: float, now_s: float, deadline_s: float) -> None:
        """Take a start that was not done in time.

        Args:
            role: the worker's role.
            begun_s: when the start began. Starts that began before the last failure was noticed count as one with it.
            now_s: present time.
            deadline_s: seconds that the start had.
        """
        last = self._failures.get(role)
        if last is not None and begun_s < last.noticed_s:
            return
        count = last.count + 1 if last else 1
        wait_s = min(self._wait_s_max, deadline_s * 2.0 ** min(count - 2, 30)) if count > 1 else 0.0
        self._failures[role] = _Failures(count, now_s, now_s + wait_s)

    def note_success(self, role: Role, ready_at_s: float) -> None:
        """Take a worker that became ready at `ready_at_s`, which counts if that is later than the last failure."""
        last = self._failures.get(role)
        if last is not None and ready_at_s > last.noticed_s:
            del self._failures[role]

    def failures(self, role: Role) -> int:
        """Count the failed starts of a role in a row."""
        return self._failures[role].count if role in self._failures else 0

    def wait_s(self, role: Role, now_s: float) -> float:
        """Give the seconds for which no worker of a role may be started."""
        return max(0.0, self._failures[role].until_s - now_s) if role in self._failures else 0.0


_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """Times of an actor, in seconds."""

    hold_s: float = 600.0
    """How long the workers stay as somebody else has set them."""
    start_deadline_s: float = 120.0
    """A worker that is not ready so long after it was first seen, or silent for so long, does not count any more and is replaced."""
    flip_again_s: float = 600.0
    """After a flip that failed, workers of its role are added and retired instead, for so long."""
    flip_refused_s: float = 30.0
    """Likewise after one that the deployment refused, as the worker was the last one of its kind: that changes soon."""
    start_deadline_factor: float = 3.0
    """The deadline is at least so many times the last measured start of its role."""
    start_wait_s_max: float = 1800.0
    """Longest wait before workers of a role are started again, where starts in a row have failed."""
    start_proof_s: float = 10.0
    """A start has succeeded once its worker is ready for so long and not silent."""
    flip_wait_s: float = 2.0
    """A flip that takes longer, as the worker drains first, goes on while the actor looks after the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was done of a plan.

    `held` says why nothing was done; empty where something could be. `refused` are the deployment's reasons against single
    changes. `waits` says which roles start no worker yet.
    """

    plan: ScalingPlan
    held: str = ""
    refused: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A deployment before a round of changes.

    Attributes:
        scale: the workers as they are.
        now: workers of each role that count: ready ones, and starting and silent ones before their deadline.
        overdue: names of workers that are past it.
        held: why the workers stay as they are; empty where changes are free.
    """

    scale: Scale
    now: Mapping[Role, int]
    overdue: tuple[str, ...] = ()
    held: str = ""


class Actor:
    """Changes a deployment towards targets. One task owns it; event-loop time is its clock."""

    def __init__(
        self, connector: ScalingConnector, *, by: str = "planner", config: ActorConfig | None = None
    ) -> None:
        """Change nothing yet.

        Args:
            connector: the deployment; the caller closes it.
            by: the actor's name in the deployment's log. Others must have other names.
            config: times.
        """
        self._connector = connector
        self._by = by
        self._config = config or ActorConfig()
        self._revision: int | None = None
        self._held_until_s = 0.0
        self._held_why = ""
        self._pending_since: dict[str, float] = {}
        self._starts = StartBackoff(wait_s_max=self._config.start_wait_s_max)
        self._rigid_until_s: dict[tuple[Role, Role], float] = {}
        self._flipping: dict[str, tuple[Role, Role]] = {}
        self._kept_until_s: dict[str, float] = {}
        """Workers that the deployment refused to end, such as the last one with an adapter: others are tried first."""
        self._refused: tuple[str, ...] = ()
        """Reasons of the last round, which are logged once."""

    async def look(self, silent: Collection[str] = ()) -> Look:
        """See how the deployment is.

        Args:
            silent: workers that do not tell what they do.

        Raises:
            Unavailable: the deployment does not answer.
        """
        scale = await self._connector.scale()
        now_s = asyncio.get_running_loop().time()
        self._notice(scale, now_s)
        self._note_flips(scale)
        overdue = self._overdue(scale, silent, now_s)
        left_s = self._held_until_s - now_s
        return Look(
            scale=scale,
            now={
                limit.role: sum(replica.name not in overdue for replica in scale.of(limit.role))
                for limit in scale.limits
            },
            overdue=overdue,
            held=f"{self._held_why}; the planner waits {left_s:.0f} s more" if left_s > 0 else "",
        )

    @property
    def rigid(self) -> tuple[tuple[Role, Role], ...]:
        """(from, to) roles that a worker has lately failed to change between."""
        now_s = asyncio.get_running_loop().time()
        return tuple(sorted(roles for roles, until_s in self._rigid_until_s.items() if now_s < until_s))

    async def carry_out(
        self,
        target: Mapping[Role, int],
        *,
        load: Mapping[str, float] | None = None,
        look: Look | None = None,
        is_dry: bool = False,
    ) -> Outcome:
        """Begin the changes towards `target`; returns once short flips are done and the rest has begun.

        Call it again with each decision: what could not be done yet is planned anew.

        Args:
            target: workers wanted of each role; other roles stay.
            load: work of each worker by name; the least loaded are flipped and retired first.
            look: the last look; None looks now.
            is_dry: plan and change nothing.

        Raises:
            Unavailable: the deployment does not answer.
        """
        seen = look or await self.look()
        if seen.held:
            return Outcome(plan=ScalingPlan(), held=seen.held)
        now_s = asyncio.get_running_loop().time()
        self._kept_until_s = {name: end_s for name, end_s in self._kept_until_s.items() if now_s < end_s}
        work = {**(load or {}), **dict.fromkeys(self._kept_until_s, math.inf)}
        owners = {limit.role: limit.owner for limit in seen.scale.limits if limit.owner}
        wanted = {role: count for role, count in target.items() if role not in owners}
        plan = make_plan(
            seen.scale,
            wanted,
            load=work,
            overdue=seen.overdue,
            rigid=tuple(permutations(wanted, 2)) if seen.scale.held else self.rigid,
            waiting=[role for role in wanted if self._starts.wait_s(role, now_s)],
        )
        refused = [
            f"{role}: {target[role]} are wanted and {seen.now.get(role, 0)} are there: {owner} decides"
            for role, owner in owners.items()
            if target.get(role, seen.now.get(role)) != seen.now.get(role)
        ]
        if seen.scale.held and (plan.retires or plan.late):
            refused.append(seen.scale.held)
            plan = replace(plan, retires=(), late=())
        if not is_dry:
            refused += await self._make(plan, seen.scale)
        self._refused = tuple(refused)
        waits = tuple(self._wait(role, count, now_s) for role, count in plan.later_adds.items())
        return Outcome(plan=plan, refused=tuple(refused), waits=waits)

    def _notice(self, scale: Scale, now_s: float) -> None:
        """Hold still if somebody else has changed the workers since the last time, and not where a change made here has come about late."""
        is_own = self._revision is not None and scale.revision == self._revision + 1
        is_own = is_own and scale.changed_by == self._by
        if self._revision is not None and scale.revision != self._revision and not is_own:
            self._held_until_s = now_s + self._config.hold_s
            counts = ", ".join(f"{len(scale.of(limit.role))} {limit.role}" for limit in scale.limits)
            self._held_why = f"{scale.changed_by or 'somebody'} has set {counts}"
            _log.warning(
                "foreign_scale_adopted",
                by=scale.changed_by,
                revision=scale.revision,
                hold_s=self._config.hold_s,
                workers=counts,
            )
        self._revision = scale.revision

    def _note_flips(self, scale: Scale) -> None:
        """Note which of the long flips have failed."""
        states = {replica.name: replica for replica in scale.replicas}
        for name, (source, to) in list(self._flipping.items()):
            replica = states.get(name)
            if replica is not None and replica.state is ReplicaState.FLIPPING:
                continue
            del self._flipping[name]
            if replica is not None and replica.role is source:
                self._make_rigid(source, to, self._config.flip_again_s)

    def _make_rigid(self, source: Role, to: Role, seconds: float) -> None:
        self._rigid_until_s[source, to] = asyncio.get_running_loop().time() + seconds

    def _overdue(self, scale: Scale, silent: Collection[str], now_s: float) -> tuple[str, ...]:
        """Name the workers that have not become ready in time or are silent for too long, and learn which starts succeed."""
        pending: dict[str, Role] = {}
        for replica in scale.replicas:
            is_silent = replica.state is ReplicaState.READY and replica.name in silent
            if is_silent or replica.state in {ReplicaState.STARTING, ReplicaState.FAILED}:
                pending[replica.name] = replica.role
            elif replica.state is ReplicaState.READY and replica.age_s >= self._config.start_proof_s:
                self._starts.note_success(replica.role, now_s - replica.age_s)
        self._pending_since = {name: self._pending_since.get(name, now_s) for name in pending}
        deadlines = {limit.role: self._deadline_s(limit) for limit in scale.limits}
        overdue = []
        for name, role in pending.items():
            begun_s = self._pending_since[name]
            deadline_s = deadlines.get(role, self._config.start_deadline_s)
            if now_s - begun_s >= deadline_s:
                overdue.append(name)
                self._starts.note_failure(role, begun_s=begun_s, now_s=now_s, deadline_s=deadline_s)
        return tuple(overdue)

    def _wait(self, role: Role, count: int, now_s: float) -> str:
        """Say why workers that are wanted do not start yet."""
        return (
            f"{role}: {count} more wanted, tried again in {self._starts.wait_s(role, now_s):.0f} s, as"
            f" {self._starts.failures(role)} starts in a row were not done in time"
        )

    def _deadline_s(self, limit: RoleLimit) -> float:
        measured_s = (limit.start_s or 0.0) * self._config.start_deadline_factor
        return max(self._config.start_deadline_s, measured_s)

    async def _make(self, plan: ScalingPlan, scale: Scale) -> list[str]:
        """Make the changes in order; returns the reasons against those that were refused. Stops at a foreign change."""
        refused: list[str] = []
        roles = {replica.name: replica.role for replica in scale.replicas}
        rooms = {limit.role: limit for limit in scale.limits}
        try:
            for name, role in plan.flips:
                revision = self._revision
                if not await self._try(self._flip(name, roles[name], role), refused):
                    was_accepted = self._revision != revision
                    self._make_rigid(
                        roles[name],
                        role,
                        self._config.flip_again_s if was_accepted else self._config.flip_refused_s,
                    )
            for role, count in plan.adds.items():
                fitting = self._fitting(rooms.get(role), count, refused)
                if fitting:
                    await self._try(
                        self._connector.add(role, fitting, by=self._by, revision=self._revision), refused
                    )
            for name in plan.retires:
                retire = self._connector.retire([name], by=self._by, revision=self._revision)
                if not await self._try(retire, refused):
                    now_s = asyncio.get_running_loop().time()
                    self._kept_until_s[name] = now_s + self._config.flip_again_s
                self._pending_since.pop(name, None)  # the name may come back
        except _ForeignChangeError as error:
            refused.append(str(error))
        return refused

    async def _flip(self, name: str, source: Role, to: Role) -> None:
        """Flip a worker, and wait a moment for it."""
        try:
            async with asyncio.timeout(self._config.flip_wait_s):
                await self._connector.flip(name, to, by=self._by, revision=self._revision)
        except TimeoutError:
            self._flipping[name] = source, to

    @staticmethod
    def _fitting(limit: RoleLimit | None, count: int, refused: list[str]) -> int:
        """Give how many of `count` workers find room, and note why not all."""
        if limit is None or limit.room is None or limit.room >= count:
            return count
        refused.append(f"{limit.role}: {count} more are wanted, {limit.room} can be added: {limit.why}")
        return limit.room

    async def _try(self, change: Awaitable[object], refused: list[str]) -> bool:
        """Await one change; returns whether it was made.

        Raises:
            _ForeignChangeError: somebody else has scaled since the actor looked.
        """
        try:
            await change
        except PenstockError as error:
            scale = await self._connector.scale()
            if scale.revision != self._revision and scale.changed_by != self._by:
                raise _ForeignChangeError(error.message) from error
            self._revision = scale.revision  # a flip that the worker refuses was accepted first
            refused.append(error.message)
            if error.message not in self._refused:
                _log.warning("change_refused", by=self._by, error=error.message)
            return False
        assert self._revision is not None, "looked"
        self._revision += 1
        return True


class _ForeignChangeError(Exception):
    """Somebody else has scaled; the next look adopts it."""
