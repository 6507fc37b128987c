"""Decides whether a server gets requests, from the outcomes of requests and health checks. Pure: it has no clock."""

from dataclasses import dataclass, field

from penstock.engine.openai.config import HealthConfig


@dataclass(slots=True)
class Breaker:
    """A circuit breaker: closed while the server serves, open after failures in a row, closed again by a good trial.

    Requests and health checks are counted separately: a server whose `/health` is fine may still answer garbage.
    """

    config: HealthConfig
    problem: str | None = None
    """Why the server gets no requests; None while it does."""
    _failed_requests: int = field(default=0, init=False)
    _failed_checks: int = field(default=0, init=False)
    _failed_trials: int = field(default=0, init=False)

    @property
    def is_open(self) -> bool:
        return self.problem is not None

    def request_failed(self, reason: str) -> None:
        """Count a request that the server broke; its own refusals are none."""
        self._failed_requests += 1
        if not self.is_open and self._failed_requests >= self.config.failures_max:
            self.problem = f"{reason} ({self._failed_requests} requests in a row failed)"

    def request_succeeded(self) -> None:
        self._failed_requests = 0

    def check_failed(self, reason: str, *, at_once: bool = False) -> None:
        """Count a failed health check, or a failed trial of an open breaker.

        Args:
            reason: what is wrong with the server.
            at_once: no server that will serve soon answers like this; one failure is enough.
        """
        if self.is_open:
            self._failed_trials += 1
            self.problem = reason
            return
        self._failed_checks += 1
        if at_once or self._failed_checks >= self.config.failures_max:
            self.problem = reason

    def check_succeeded(self) -> None:
        """Note a good health check, or the good trial that closes an open breaker."""
        self._failed_checks = 0
        if self.is_open:
            self.problem = None
            self._failed_requests = self._failed_trials = 0

    @property
    def delay_s(self) -> float:
        """Seconds until the next check or trial."""
        config = self.config
        if not self.is_open:
            return config.interval_s
        return min(
            config.interval_s * 2.0 ** min(self._failed_trials, 30),
            max(config.retry_s_max, config.interval_s),
        )
