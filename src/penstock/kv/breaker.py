"""A circuit breaker: after failures in a row a tier is not used for a pause; then one operation tries it again."""

import asyncio
from dataclasses import dataclass

from penstock.core.log import get_logger


@dataclass(slots=True, eq=False)
class Attempt:
    """One operation that the breaker let through."""

    is_probe: bool


class CircuitBreaker:
    """On until `failures_max` operations in a row have failed, then off for a pause, then half open.

    A half-open breaker lets one operation through, the probe. If the probe succeeds the breaker is on again; if it fails the
    next pause is twice as long. One task owns it; the event loop is its clock.

    Attributes:
        name: the tier's name in the log.
    """

    def __init__(
        self, name: str, *, failures_max: int = 3, pause_s: float = 1.0, pause_max_s: float = 60.0
    ) -> None:
        """Begin on.

        Args:
            name: the tier's name in the log.
            failures_max: failures in a row that turn it off, at least 1.
            pause_s: how long it is off at first.
            pause_max_s: the longest pause.
        """
        self.name = name
        self._failures_max = failures_max
        self._first_pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._failures = 0
        self._pause_s = 0.0  # above 0: off
        self._retry_at_s = 0.0
        self._is_probing = False

    @property
    def is_on(self) -> bool:
        """Whether it is on, and not half open."""
        return self._pause_s == 0

    @property
    def lets_through(self) -> bool:
        """Whether `begin` would let an operation through now."""
        return self.is_on or (not self._is_probing and asyncio.get_running_loop().time() >= self._retry_at_s)

    def begin(self) -> Attempt | None:
        """Ask to run an operation; None if it must not run. Report its end with `succeeded`, `failed` or `abandoned`."""
        if not self.lets_through:
            return None
        self._is_probing = not self.is_on
        return Attempt(self._is_probing)

    def succeeded(self, attempt: Attempt) -> None:
        """Report that an operation succeeded: the breaker is on, even if the operation began before it went off."""
        self._failures = 0
        self._is_probing &= not attempt.is_probe
        if not self.is_on:
            self._pause_s = 0.0
            get_logger().info("kv_tier_on", tier=self.name)

    def failed(self, attempt: Attempt, error: Exception) -> None:
        """Report that an operation failed, or took too long."""
        self._failures += 1
        if attempt.is_probe:
            self._is_probing = False
            self._turn_off(min(2 * self._pause_s, self._pause_max_s))
        elif self.is_on and self._failures >= self._failures_max:
            self.trip(error)

    def abandoned(self, attempt: Attempt) -> None:
        """Report that an operation was cancelled, which says nothing about the tier."""
        self._is_probing &= not attempt.is_probe

    def trip(self, error: Exception) -> None:
        """Turn it off at once, with one warning; no effect if it is off."""
        if not self.is_on:
            return
        self._turn_off(self._first_pause_s)
        get_logger().warning(
            "kv_tier_off",
            tier=self.name,
            error=str(error),
            effect="blocks are computed instead; the tier is tried again by itself",
            retry_s=self._pause_s,
        )

    def _turn_off(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._retry_at_s = asyncio.get_running_loop().time() + pause_s
