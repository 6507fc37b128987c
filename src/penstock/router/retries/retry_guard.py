"""What keeps retries from doing harm, for all requests of a frontend together."""

import random

from penstock.router.config import MigrationConfig, RetryConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.retries.isolation import PoisonIsolation
from penstock.router.retries.pace import Pace
from penstock.router.retries.quarantine import Quarantine


class RetryGuard:
    """A pace for lost requests, a budget for refused ones, and isolation and quarantine against a prompt that kills workers."""

    def __init__(
        self, config: RetryConfig, migrations: MigrationConfig, *, metrics: RouterMetrics, rng: random.Random
    ) -> None:
        self.config = config
        self.migrations = migrations
        self.budget = RetryBudget(config)
        self.pace = Pace(migrations)
        self.quarantine = Quarantine(config)
        self.isolation = PoisonIsolation()
        self.metrics = metrics
        self.rng = rng

    def check(self) -> None:
        """Raise AssertionError where a bound is broken."""
        self.budget.check()
        self.pace.check()
        self.quarantine.check()
        self.isolation.check()

    def check_at_rest(self) -> None:
        """Raise AssertionError where something is left of requests that have ended."""
        assert not self.pace.expected, f"{self.pace.expected} are about to move"
        assert self.isolation.is_empty, "a suspect has its place, or waits for it"


class RetryBudget:
    """A token bucket: tries are earned with time and with requests, up to a burst; beyond it a refusal stands."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._balance = float(config.burst)
        self._seen_s = 0.0

    def earn(self) -> None:
        """Note that a request was opened."""
        self._balance = min(self._balance + self._config.per_request, self._config.burst)

    def spend(self, now_s: float) -> bool:
        """Spend one try; False, and nothing is spent, where none is left."""
        config = self._config
        self._balance = min(self._balance + (now_s - self._seen_s) * config.per_s, config.burst)
        self._seen_s = now_s
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True

    def check(self) -> None:
        assert 0 <= self._balance <= self._config.burst, (
            f"{self._balance} tries of at most {self._config.burst}"
        )
