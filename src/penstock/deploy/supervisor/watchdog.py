"""When a process is given up that says nothing, or whose engine stands still.

Time is counted in turns of the supervisor's own loop, not read from a clock: a supervisor that was stopped, or a machine that
slept, takes one turn when it goes on, and blames nobody for the silence that it slept through itself.
"""

from dataclasses import dataclass

from penstock.deploy.messages import Beat
from penstock.graph import Supervision

_TURN_S = 1.0
_TURNS_MIN = 4  # in the shortest allowance, so that it is kept about as it was set


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a process is to be killed: `reason` for metrics, `why` for people."""

    reason: str
    why: str


class Watchdog:
    """Counts one process's silence. Whoever owns it calls `turn` every `turn_s` seconds."""

    def __init__(self, settings: Supervision) -> None:
        """Begin with a process that starts."""
        self.turn_s = turn_s(settings)
        """Seconds from one `turn` to the next."""
        self.verdict: Verdict | None = None
        """What the last turn came to; None while the process may live."""
        self._settings = settings
        self._is_ready = False
        self._quiet = 0  # turns since it was started, got ready, or said that it is there
        self._still = 0  # turns in which its engine had requests and finished no step
        self._beat = Beat()

    def ready(self) -> None:
        """Hear that it serves: from now on it is to say so again and again."""
        self._is_ready = True
        self._quiet = self._still = 0

    def beat(self, beat: Beat) -> None:
        """Hear that its event loop runs, and how far its engine is."""
        self._quiet = 0
        if beat.steps != self._beat.steps or not beat.has_requests:
            self._still = 0
        self._beat = beat

    def turn(self) -> Verdict | None:
        """Count a turn; returns why the process is to be killed, if it is."""
        self._quiet += 1
        self._still += self._beat.has_requests
        self.verdict = self._judge()
        return self.verdict

    def _judge(self) -> Verdict | None:
        settings = self._settings
        if not self._is_ready:
            if self._quiet * self.turn_s < settings.start_timeout_s:
                return None
            return Verdict("start_timeout", f"not ready {settings.start_timeout_s:g} s after its start")
        if self._quiet * self.turn_s >= settings.liveness_timeout_s:
            return Verdict(
                "silent",
                f"killed after {settings.liveness_timeout_s:g} s of silence (supervision.liveness_timeout_s)",
            )
        if self._still * self.turn_s >= settings.step_timeout_s:
            return Verdict(
                "stuck",
                f"killed as its engine had requests and finished no step for {settings.step_timeout_s:g} s"
                " (supervision.step_timeout_s)",
            )
        return None


def turn_s(settings: Supervision) -> float:
    """Give the seconds between two turns, and between two heartbeats of a process."""
    allowances = (settings.start_timeout_s, settings.liveness_timeout_s, settings.step_timeout_s)
    return min(_TURN_S, min(allowances) / _TURNS_MIN)
