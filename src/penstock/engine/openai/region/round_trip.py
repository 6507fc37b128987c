"""How far another region is: the time of the questions that a link asks it anyway."""

from collections import deque
from statistics import median

_LATEST = 15
"""Answers that count, of 2 to 3 s: a median of them passes over pauses of either side, and follows a new route in a second or two."""


class RoundTrip:
    """The median time of the latest answers. One event loop owns it."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._latest_s: deque[float] = deque(maxlen=_LATEST)

    @property
    def seconds(self) -> float:
        """The time there and back; 0 before the first answer."""
        return median(self._latest_s) if self._latest_s else 0.0

    def note(self, seconds: float) -> None:
        """Note the time from a question, sent on an open connection, to the head of its answer."""
        self._latest_s.append(seconds)
