"""A budget for the tries of refused requests elsewhere, so that full workers are not overrun by repetitions."""

from penstock.router.config import RetryConfig


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
