"""What keeps retries from doing harm, for all requests of a frontend together."""

import random

from penstock.router.config import RetryConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.probation import Probation
from penstock.router.quarantine import Quarantine
from penstock.router.retries import RetryBudget


class Brakes:
    """A budget against overrunning a failing fleet; quarantine and probation against a prompt that kills workers."""

    def __init__(self, config: RetryConfig, *, metrics: RouterMetrics, rng: random.Random) -> None:
        self.config = config
        self.budget = RetryBudget(config)
        self.quarantine = Quarantine(config)
        self.probation = Probation()
        self.metrics = metrics
        self.rng = rng

    def check(self) -> None:
        """Raise AssertionError where a bound is broken."""
        self.budget.check()
        self.quarantine.check()
        self.probation.check()
