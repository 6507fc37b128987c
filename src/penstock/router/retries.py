"""A budget for all retries together, so that a failing deployment is not overrun by its own repetitions."""

from penstock.router.config import RetryConfig


class RetryBudget:
    """A token bucket: retries are earned with time and with requests, up to a burst.

    The burst lets everything that ran on one worker go on elsewhere at once when the worker is lost; beyond it
    retries are put off, and then refused.
    """

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._balance = float(config.burst)
        self._seen_s = 0.0

    def earn(self) -> None:
        """Note that a request was opened."""
        self._balance = min(self._balance + self._config.per_request, self._config.burst)

    def take(self, now_s: float, *, wait_s_max: float) -> float | None:
        """Spend one retry.

        Returns:
            Seconds to wait before it; None, and nothing is spent, where that is more than `wait_s_max`.
        """
        config = self._config
        self._balance = min(self._balance + (now_s - self._seen_s) * config.per_s, config.burst)
        self._seen_s = now_s
        missing = 1.0 - self._balance
        wait_s = 0.0 if missing <= 0 else missing / config.per_s if config.per_s else float("inf")
        if wait_s > wait_s_max:
            return None
        self._balance -= 1.0
        return wait_s

    def check(self) -> None:
        assert self._balance <= self._config.burst, f"{self._balance} retries of at most {self._config.burst}"
        least = -self._config.wait_s_max * self._config.per_s
        assert self._balance >= least - 1e-6, f"{self._balance} retries owed, at most {-least}"
