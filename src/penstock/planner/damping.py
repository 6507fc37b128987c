"""Damps decisions: workers are added at once, taken away late, and may change roles during a cool-down."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.planner.observation import ObservedWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class DamperConfig:
    """Bounds and times of one role."""

    replicas_min: int = 1
    replicas_max: int = 8
    cool_down_s: float = 100.0
    """Scale-in goes to the most that was wanted for so long, or for a start."""

    def __post_init__(self) -> None:
        """Check the settings; raises ConfigError."""
        if not 0 <= self.replicas_min <= self.replicas_max:
            raise ConfigError(
                f"planner: replicas_min is {self.replicas_min}, replicas_max {self.replicas_max}: expected 0 <= min <= max"
            )
        if not self.cool_down_s >= 0:
            raise ConfigError(f"planner: cool_down_s is {self.cool_down_s}: expected at least 0")


@dataclass(slots=True)
class Damper:
    """Remembers what was wanted of one role. Not thread-safe; times are seconds of one clock, given by the caller."""

    config: DamperConfig = field(default_factory=DamperConfig)
    _begun_s: float | None = None
    _last: int | None = None
    """What was wanted at the last call; it held until the next one."""
    _before: deque[tuple[float, int]] = field(default_factory=deque)
    """Until when so many were wanted, in the last `cool_down_s`: later ones are fewer."""

    def cools_for_s(self, now_s: float, start_s: float = 0.0) -> float:
        """Give the seconds until the number may decrease, if what is wanted stays as it is; `start_s` as for `damp`."""
        since_s = now_s if self._begun_s is None else self._begun_s
        larger = (until_s for until_s, count in self._before if self._last is not None and count > self._last)
        return max(0.0, max(larger, default=since_s) + max(self.config.cool_down_s, start_s) - now_s)

    def damp(self, now_s: float, have: int, wanted: int, start_s: float = 0.0) -> int:
        """Give the replicas to aim at.

        Scale-out is immediate. Scale-in goes to the most that was wanted during the cool-down, so neither a short dip nor a new
        planner scales in.

        Args:
            now_s: present time.
            have: replicas that count: ready ones, and pending ones before their deadline.
            wanted: replicas that were decided.
            start_s: seconds until a replica that is added serves; a cool-down is not shorter, or what was taken away would still
                start as it is needed again.
        """
        config = self.config
        cool_down_s = max(config.cool_down_s, start_s)
        if self._begun_s is None:
            self._begun_s = now_s
        target = min(max(wanted, config.replicas_min), config.replicas_max)
        most = self._most(now_s, target, cool_down_s)
        within = config.replicas_min <= have <= config.replicas_max
        if not within or target >= have:
            return target
        if now_s - self._begun_s < cool_down_s or most >= have:
            return have
        return most

    def _most(self, now_s: float, target: int, cool_down_s: float) -> int:
        """Note what is wanted, and give the most that was wanted during the cool-down."""
        if self._last is not None:
            while self._before and self._before[-1][1] <= self._last:
                self._before.pop()
            self._before.append((now_s, self._last))
        while self._before and now_s - self._before[0][0] >= cool_down_s:
            self._before.popleft()
        self._last = target
        return max([target, *(count for _, count in self._before)])


@dataclass(frozen=True, slots=True)
class Damped:
    """Replicas to aim at, and why they differ from those that were decided."""

    target: dict[Role, int]
    why: tuple[str, ...] = ()


class Damping:
    """The dampers of a deployment's roles. One task owns it; times are seconds of one clock, given by the caller."""

    def __init__(self, configs: Mapping[Role, DamperConfig], *, flip_again_s: float = 30.0) -> None:
        """Make the dampers.

        Args:
            configs: bounds and times of each role.
            flip_again_s: seconds after which a role gives back workers that it took from another one.
        """
        self._dampers = {role: Damper(config) for role, config in configs.items()}
        self._flip_again_s = flip_again_s
        self._flipped_s: dict[tuple[Role, Role], float] = {}
        """Last exchange by (from, to)."""

    def damp(
        self,
        now_s: float,
        have: Mapping[Role, int],
        wanted: Mapping[Role, int],
        *,
        start_s: float = 0.0,
        may_flip: Callable[[Role, Role], bool] = lambda _one, _other: True,
    ) -> Damped:
        """Give the replicas of each role to aim at.

        Args:
            now_s: present time.
            have: replicas that count.
            wanted: replicas that were decided.
            start_s: seconds until a replica that is added serves.
            may_flip: whether workers of the first role can take the second.
        """
        target = {
            role: damper.damp(now_s, have.get(role, 0), wanted.get(role, 0), start_s)
            for role, damper in self._dampers.items()
        }
        exchanged = self._exchange(now_s, have, wanted, target, may_flip)
        why = [self._why(role, now_s, wanted.get(role, 0), count, start_s) for role, count in target.items()]
        return Damped(target, (*filter(None, why), *exchanged))

    def _exchange(
        self,
        now_s: float,
        have: Mapping[Role, int],
        wanted: Mapping[Role, int],
        target: dict[Role, int],
        may_flip: Callable[[Role, Role], bool],
    ) -> list[str]:
        """Let roles that lack workers take those that others keep for their cool-down alone; changes `target`."""
        said = []
        free = {role: max(0, have.get(role, 0) - count) for role, count in target.items()}
        for to, count in list(target.items()):
            lack = max(0, count - have.get(to, 0))
            sources = [source for source in target if may_flip(source, to)]
            for source in sources:  # those that damping lets go anyway
                taken = min(lack, free[source])
                free[source] -= taken
                lack -= taken
            for source in sources:
                least = max(wanted.get(source, 0), self._dampers[source].config.replicas_min)
                spare = target[source] - least if target[source] <= have.get(source, 0) else 0
                moved = min(lack, spare)
                is_back = now_s - self._flipped_s.get((to, source), -math.inf) < self._flip_again_s
                if moved > 0 and not is_back:
                    target[source] -= moved
                    lack -= moved
                    self._flipped_s[source, to] = now_s
                    said.append(f"{source}: {moved} may become {to} during the cool-down")
        return said

    def _why(self, role: Role, now_s: float, wanted: int, target: int, start_s: float) -> str:
        config = self._dampers[role].config
        if target == wanted:
            return ""
        if target < wanted:
            return f"{role}: {wanted} wanted, at most {config.replicas_max} allowed"
        if target == config.replicas_min:
            return f"{role}: {wanted} wanted, at least {config.replicas_min} kept"
        left_s = self._dampers[role].cools_for_s(now_s, start_s)
        return f"{role}: {wanted} wanted, {target} kept for {left_s:.0f} s of cool-down"


def warm(workers: Iterable[ObservedWorker], cold_s: float) -> tuple[ObservedWorker, ...]:
    """Give the workers ready for at least `cold_s`: the first samples of others show caches that fill and code that compiles."""
    return tuple(worker for worker in workers if worker.ready_s >= cold_s)
