"""Waits before workers are started again whose starts keep failing."""

from dataclasses import dataclass

from penstock.core.types.instances import Role


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
