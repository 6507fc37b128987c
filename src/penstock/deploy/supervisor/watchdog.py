"""Decides when to kill a process that sends no heartbeat, or whose engine finishes no step.

Time is counted in ticks of the supervisor's event loop, not read from a clock: after a stop of the supervisor or a sleep
of the machine only one tick has passed, and no process is blamed for the pause.
"""

from dataclasses import dataclass

from penstock.deploy.messages import Beat
from penstock.graph import Supervision

CLOSE_TIMEOUT = "close_timeout"
_TURN_S = 1.0
_TICKS_MIN = 4  # ticks in the shortest timeout, for its precision


@dataclass(frozen=True, slots=True)
class Verdict:
    """Reasons to kill a process: `reason` for metrics, `why` for the log."""

    reason: str
    why: str


class Watchdog:
    """Watches one process. Its owner calls `tick` every `tick_s` seconds."""

    def __init__(self, settings: Supervision) -> None:
        """Start watching a process that is starting."""
        self.tick_s = tick_s(settings)
        """Seconds between ticks."""
        self.verdict: Verdict | None = None
        """Result of the last tick; None while the process may live."""
        self._settings = settings
        self._is_ready = False
        self._quiet = 0  # ticks since its start, ready report or last heartbeat
        self._still = 0  # ticks in which its engine had requests and finished no step
        self._closing: int | None = None  # ticks since its engine began to close
        self._beat = Beat()

    def ready(self) -> None:
        """Note that the process is ready: heartbeats are required from now on."""
        self._is_ready = True
        self._quiet = self._still = 0

    def beat(self, beat: Beat) -> None:
        """Note a heartbeat and the engine's progress."""
        self._quiet = 0
        if beat.steps != self._beat.steps or not beat.has_requests:
            self._still = 0
        self._beat = beat

    def closing(self) -> None:
        """Note that the engine begins to close."""
        self._closing = 0

    def tick(self) -> Verdict | None:
        """Count a tick; returns a verdict if the process must be killed."""
        self._quiet += 1
        self._still += self._beat.has_requests
        if self._closing is not None:
            self._closing += 1
        self.verdict = self._judge()
        return self.verdict

    def _judge(self) -> Verdict | None:
        settings = self._settings
        if self._closing is not None:
            return self._judge_closing(self._closing * self.tick_s)
        if not self._is_ready:
            if self._quiet * self.tick_s < settings.start_timeout_s:
                return None
            return Verdict("start_timeout", f"not ready {settings.start_timeout_s:g} s after its start")
        if self._quiet * self.tick_s >= settings.liveness_timeout_s:
            return Verdict(
                "silent",
                f"killed after {settings.liveness_timeout_s:g} s of silence (supervision.liveness_timeout_s)",
            )
        if self._still * self.tick_s >= settings.step_timeout_s:
            return Verdict(
                "stuck",
                f"killed as its engine had requests and finished no step for {settings.step_timeout_s:g} s"
                " (supervision.step_timeout_s)",
            )
        return None

    def _judge_closing(self, taken_s: float) -> Verdict | None:
        limit_s = self._settings.close_timeout_s
        if taken_s < limit_s:
            return None
        return Verdict(
            CLOSE_TIMEOUT,
            f"killed as its engine did not close within {limit_s:g} s (supervision.close_timeout_s)",
        )


def tick_s(settings: Supervision) -> float:
    """Give the seconds between ticks, and between heartbeats."""
    allowances = (
        settings.start_timeout_s,
        settings.liveness_timeout_s,
        settings.step_timeout_s,
        settings.close_timeout_s,
    )
    return min(_TURN_S, min(allowances) / _TICKS_MIN)
