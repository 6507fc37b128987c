"""What keeps retries from doing harm, for all requests of a frontend together."""

import random

from penstock.router.config import MigrationConfig, RetryConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.retries.isolation import PoisonIsolation
from penstock.router.retries.pace import Pace
from penstock.router.retries.quarantine import Quarantine
from penstock.router.retries.retries import RetryBudget


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
