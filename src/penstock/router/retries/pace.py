"""When requests of lost workers go on elsewhere: `at_once` of them now, the others spread over `spread_s`.

So thousands of streams of a lost host go on within seconds, and the loop serves other requests between two of them. No request
is refused: open requests are bounded, and each has its deadline.
"""

from collections import deque

from penstock.router.config import MigrationConfig


class MigrationPace:
    """Gives each request its time to go on. One event loop owns it."""

    def __init__(self, config: MigrationConfig) -> None:
        self._config = config
        self.expected = 0
        """Requests that will ask for their time soon."""
        self._at_once = float(config.at_once)
        self._seen_s = 0.0
        self._departures_s: deque[float] = deque()  # of waiting requests, in order

    def expect(self, change: int) -> None:
        """Count a request that will ask for its time (1), or that no longer will (-1)."""
        self.expected += change

    def depart(self, now_s: float) -> float:
        """Give one request its time to go on, in seconds from now."""
        at_once, spread_s = self._config.at_once, self._config.spread_s
        if not spread_s:
            return 0.0
        waiting = self._departures_s
        while waiting and waiting[0] <= now_s:
            waiting.popleft()
        if not waiting:
            since_s = now_s - self._seen_s
            self._at_once = min(self._at_once + since_s * at_once / spread_s, at_once)
            self._seen_s = now_s
            if self._at_once >= 1.0:
                self._at_once -= 1.0
                return 0.0
        last_s = waiting[-1] if waiting else now_s
        waiting.append(last_s + spread_s / max(len(waiting) + self.expected, at_once))
        self._seen_s = waiting[-1]  # nothing is saved up while some wait
        return waiting[-1] - now_s

    def check(self) -> None:
        assert self._at_once <= self._config.at_once, f"{self._at_once} may go at once"
        assert self.expected >= 0, f"{self.expected} are expected"
        assert list(self._departures_s) == sorted(self._departures_s), "one after the other"
