"""Wraps decisions of one role: the number of replicas changes late, little and within bounds."""

from collections import deque
from dataclasses import dataclass, field

from penstock.core.errors import ConfigError


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
