"""The round trip to another region, from the questions that its link asks anyway."""

from collections import deque
from statistics import median

_LATEST = 15
"""Answers in the median, those of 2 to 3 s. It ignores single pauses of either side, and follows a new route within 1 to 2 s."""


class RoundTrip:
    """The median time of the latest answers. One event loop owns it."""

    def __init__(self) -> None:
        """Begin without answers."""
        self._latest_s: deque[float] = deque(maxlen=_LATEST)

    @property
    def seconds(self) -> float:
        """The round trip; 0 before the first answer."""
        return median(self._latest_s) if self._latest_s else 0.0

    def note(self, seconds: float) -> None:
        """Note the time from a question, sent on an open connection, to the head of its answer."""
        self._latest_s.append(seconds)
