"""Wraps decisions of one role: the number of replicas changes late, little and within bounds."""

from dataclasses import dataclass, field

from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DamperConfig:
    """Bounds and times of one role."""

    replicas_min: int = 1
    replicas_max: int = 8
    cool_down_s: float = 300.0
    """Scale-in only so long after the last change of the number."""
    hysteresis: int = 0
    """A decrease by at most so many replicas is ignored."""

    def __post_init__(self) -> None:
        """Check the settings; raises ConfigError."""
        if not 0 <= self.replicas_min <= self.replicas_max:
            raise ConfigError(
                f"planner: replicas_min is {self.replicas_min}, replicas_max {self.replicas_max}: expected 0 <= min <= max"
            )
        if not (self.cool_down_s >= 0 and self.hysteresis >= 0):
            raise ConfigError(
                f"planner: cool_down_s is {self.cool_down_s}, hysteresis {self.hysteresis}: expected at least 0"
            )


@dataclass(slots=True)
class Damper:
    """Remembers the last change of one role. Not thread-safe; times are seconds of one clock, given by the caller."""

    config: DamperConfig = field(default_factory=DamperConfig)
    _changed_s: float | None = None
    _approved: int | None = None
    """A decrease that may go on: workers are retired late where others have to be ready first."""

    def cools_for_s(self, now_s: float) -> float:
        """Give the seconds until the number may decrease."""
        begun_s = now_s if self._changed_s is None else self._changed_s
        return max(0.0, begun_s + self.config.cool_down_s - now_s)

    def damp(self, now_s: float, have: int, wanted: int) -> int:
        """Give the replicas to aim at.

        Scale-out is immediate. The cool-down begins at the first call, so a new planner does not scale in at once.

        Args:
            now_s: present time.
            have: replicas that count: ready ones, and pending ones before their deadline.
            wanted: replicas that were decided.
        """
        config = self.config
        if self._changed_s is None:
            self._changed_s = now_s
        target = min(max(wanted, config.replicas_min), config.replicas_max)
        if self._approved is not None and target <= self._approved < have:
            return self._approved
        self._approved = None
        within = config.replicas_min <= have <= config.replicas_max
        if within and target < have:
            if self.cools_for_s(now_s) or have - target <= config.hysteresis:
                return have
            self._approved = target
        if target != have:
            self._changed_s = now_s
        return target
