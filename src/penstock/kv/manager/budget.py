"""A bandwidth budget: copies go on only as fast as bytes are granted."""

from penstock.kv.manager.clock import Clock

_BURST_S = 0.25
"""Unused budget is kept for so long."""


class Budget:
    """Grants bytes at a rate. A grant may be larger than what is left; later ones wait until it is made up for."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        """Begin with nothing left.

        Args:
            bytes_per_s: above 0.
            clock: of the grants.
        """
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._left_bytes = 0.0
        self._filled_s = clock.time()

    @property
    def piece_bytes(self) -> float:
        """What one grant should be at most."""
        return self._bytes_per_s * _BURST_S

    @property
    def wait_s(self) -> float:
        """Seconds until the next grant; 0: now."""
        now_s = self._clock.time()
        grown = self._left_bytes + (now_s - self._filled_s) * self._bytes_per_s
        self._left_bytes, self._filled_s = min(grown, self.piece_bytes), now_s
        return max(-self._left_bytes / self._bytes_per_s, 0.0)

    def take(self, num_bytes: float) -> None:
        """Note that so many bytes are copied."""
        self._left_bytes -= num_bytes
