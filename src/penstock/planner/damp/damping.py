"""Damps the decisions of all roles together: a surplus that waits for its cool-down may still change roles."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.core.types.instances import Role
from penstock.planner.damp.damper import Damper, DamperConfig


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
