"""The steps from the workers that are there to those that are wanted."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from penstock.core.types.instances import Replica, ReplicaState, Role, Scale

_RETIRE_FIRST = {ReplicaState.FAILED: 0, ReplicaState.STARTING: 1}


@dataclass(frozen=True, slots=True)
class Plan:
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
) -> Plan:
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
        return Plan(
            flips=tuple(flips),
            adds=adds,
            retires=(*replaced, *retires),
            late_flips=tuple(late_flips),
            later_adds=later_adds,
        )
    serving = {
        replica.name for role in target for replica in have[role] if replica.state is ReplicaState.READY
    }
    return Plan(
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
