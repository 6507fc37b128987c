"""Delays between restarts of a process."""

from penstock.graph import Supervision


class Backoff:
    """Doubles the delay with each consecutive failure; `healthy_after_s` of service resets it."""

    def __init__(self, settings: Supervision) -> None:
        self._settings = settings
        self._failures = 0
        self.failed_starts = 0
        """Consecutive starts that never got ready."""

    def delay_s(self, served_s: float | None) -> float:
        """Count a failure and return the seconds to wait.

        Args:
            served_s: seconds the process was ready; None if never.
        """
        if served_s is None:
            self.failed_starts += 1
        else:
            self.failed_starts = 0
            if served_s >= self._settings.healthy_after_s:
                self._failures = 0
        delay_s = self._settings.restart_delay_s * 2.0 ** min(self._failures, 30)
        self._failures += 1
        return min(delay_s, self._settings.restart_delay_max_s)
