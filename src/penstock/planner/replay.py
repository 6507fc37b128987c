"""Decides recorded rounds again, with other settings or by another version."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.planner.damping import Damped
from penstock.planner.decision_log import Entry, LoggedRound, LoggedRun
from penstock.planner.policy import Policy
from penstock.planner.record import DecisionRecord


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """A round and what it comes to now.

    wanted: workers of each role by the decision alone
    target: after damping
    why:    the decision in words
    """

    round: LoggedRound
    wanted: dict[Role, int]
    target: dict[Role, int]
    why: str
    is_compared: bool = True

    @property
    def differs(self) -> bool:
        record = self.round.record
        assert record.decision is not None, "decided"
        return self.is_compared and (self.wanted != record.decision.target or self.target != record.target)


class LogReplay:
    """Decides rounds in their order. What they saw stays as it was, also where they would have changed it."""

    def __init__(
        self, policy_of: Callable[[LoggedRun], Policy], *, cool_down_s: Callable[[LoggedRun], float]
    ) -> None:
        """Decide nothing yet.

        Args:
            policy_of: makes the policy of a run of the planner.
            cool_down_s: its cool-down. Where the beginning of a run is not in the log, rounds are compared only after it, as it is
                not known when workers last changed.
        """
        self._policy_of = policy_of
        self._cool_down_s = cool_down_s
        self.skipped = 0
        """Rounds that saw nothing, and those before the beginning of a run."""
        self.recorded_s: dict[Role, float] = {}
        """Worker-seconds of each role as they were aimed at."""
        self.replayed_s: dict[Role, float] = {}
        """Likewise of the rounds as they are decided now."""

    def run(self, entries: Iterable[Entry]) -> Iterator[ReplayedRound]:
        """Yield each round that decided something.

        Raises:
            ConfigError: the settings do not fit the recorded roles, or numbers are out of range.
        """
        policy: Policy | None = None
        compared_from_s = 0.0
        last: ReplayedRound | None = None
        for entry in entries:
            if isinstance(entry, LoggedRun):
                if entry.continues and policy is not None:
                    continue
                policy, last = self._policy_of(entry), None
                compared_from_s = self._cool_down_s(entry) if entry.continues else -1.0
                continue
            if policy is None or entry.record.decision is None:
                self.skipped += 1
                continue
            record = entry.record
            if compared_from_s >= 0 and last is None:
                compared_from_s += record.at_s
            if last is not None:
                self._add(last, record.at_s - last.round.record.at_s)
            try:
                last = _decide(policy, entry, is_compared=record.at_s >= compared_from_s)
            except ArithmeticError as error:
                raise ConfigError(
                    f"round {record.number}: its numbers are out of range ({error}); has the log been edited?"
                ) from error
            yield last

    def _add(self, last: ReplayedRound, seconds: float) -> None:
        for sums, target in ((self.recorded_s, last.round.record.target), (self.replayed_s, last.target)):
            for role, count in target.items():
                sums[role] = sums.get(role, 0.0) + count * seconds


def _decide(policy: Policy, entry: LoggedRound, *, is_compared: bool) -> ReplayedRound:
    record = entry.record
    assert record.decision is not None, "decided"
    decision = policy.decide(
        record.at_s,
        record.decision.expected,
        now=record.now,
        room=record.room,
        factors=_factors(record),
    )
    if record.held:  # the planner left the workers to somebody else
        damped = Damped(dict(record.now))
    else:
        damped = policy.damp(
            record.at_s,
            decision,
            now=record.now,
            start_s=record.horizon_s,
            may_flip=lambda *roles: roles not in record.rigid,
        )
    why = "; ".join((*damped.why, decision.explain()))
    return ReplayedRound(entry, decision.target, damped.target, why, is_compared)


def _factors(record: DecisionRecord) -> dict[Role, float]:
    return {seen.role: seen.factor for seen in record.seen.roles}
