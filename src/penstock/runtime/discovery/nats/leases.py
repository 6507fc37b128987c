"""Leases by the registry's own clock.

A bucket does not tell when a key expires, and a clock of this process would go on while the registry hangs. So each watcher
puts a beat of its own and counts time only as its beats come back: what let a beat through let renewals through too.
"""

from penstock.core.ids import WorkerId


class Leases:
    """When each worker was last renewed, in seconds in which the registry worked. One event loop owns it."""

    def __init__(self, lease_ttl_s: float, longest_beat_s: float) -> None:
        """Know nobody.

        Args:
            lease_ttl_s: a worker not renewed for so long has lapsed.
            longest_beat_s: what two beats far apart count at most.
        """
        self._lease_ttl_s = lease_ttl_s
        self._longest_beat_s = longest_beat_s
        self._clock_s = 0.0
        self._beat_at_s: float | None = None
        self._renewed_s: dict[WorkerId, float] = {}

    def renew(self, worker_id: WorkerId) -> None:
        self._renewed_s[worker_id] = self._clock_s

    def forget(self, worker_id: WorkerId) -> None:
        self._renewed_s.pop(worker_id, None)

    def restart(self) -> None:
        """Count the next beat as the first: the connection is a new one."""
        self._beat_at_s = None

    def beat(self, now_s: float) -> list[WorkerId]:
        """Take a beat that came back; returns the workers that have lapsed, and forgets them."""
        if self._beat_at_s is not None:
            self._clock_s += min(now_s - self._beat_at_s, self._longest_beat_s)
        self._beat_at_s = now_s
        ended_s = self._clock_s - self._lease_ttl_s
        lapsed = [worker_id for worker_id, renewed_s in self._renewed_s.items() if renewed_s < ended_s]
        for worker_id in lapsed:
            del self._renewed_s[worker_id]
        return lapsed
