"""Bounds of retries over all requests of a frontend."""

import random

from penstock.router.config import MigrationConfig, RetryConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.retries.isolation import PoisonIsolation
from penstock.router.retries.pace import MigrationPace
from penstock.router.retries.quarantine import PromptQuarantine


class RetryGuard:
    """The pace of lost requests, the budget of refused ones, and isolation and quarantine of prompts that kill workers."""

    def __init__(
        self, config: RetryConfig, migrations: MigrationConfig, *, metrics: RouterMetrics, rng: random.Random
    ) -> None:
        self.config = config
        self.migrations = migrations
        self.budget = RetryBudget(config)
        self.pace = MigrationPace(migrations)
        self.quarantine = PromptQuarantine(config)
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
        """Raise AssertionError where ended requests left something."""
        assert not self.pace.expected, f"{self.pace.expected} are about to move"
        assert self.isolation.is_empty, "a suspect has the slot, or waits for it"


class RetryBudget:
    """A token bucket of retries, so that full workers are not overrun. Time and opened requests fill it, up to `burst`."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._balance = float(config.burst)
        self._seen_s = 0.0

    def earn(self) -> None:
        """Add what an opened request earns."""
        self._balance = min(self._balance + self._config.per_request, self._config.burst)

    def spend(self, now_s: float) -> bool:
        """Spend one retry; False where none is left."""
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
