"""How long to wait before a process is started again."""

from penstock.graph import Supervision


class Backoff:
    """Doubles the delay with every failure in a row; a healthy while forgets them."""

    def __init__(self, settings: Supervision) -> None:
        self._settings = settings
        self._failures = 0
        self.failed_starts = 0
        """Starts in a row that never got ready."""

    def delay_s(self, served_s: float | None) -> float:
        """Count a failure and return the seconds to wait.

        Args:
            served_s: how long the process was ready; None if it never was.
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
