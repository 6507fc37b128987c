"""Poison-request isolation: suspects of killing workers run one at a time, so that the next loss shows the culprit."""

from collections.abc import Callable


class PoisonIsolation:
    """One slot for a suspect, and a queue for it. One event loop owns it."""

    def __init__(self) -> None:
        self._holder: object | None = None
        self._waiting: dict[object, Callable[[], None]] = {}

    def enter(self, suspect: object, wake: Callable[[], None]) -> bool:
        """Take the slot if it is free and no suspect waits before; else `wake` is called once it may be free.

        The caller calls `leave` in the end in either case.
        """
        if self._holder is suspect:
            return True
        self._waiting.setdefault(suspect, wake)
        if self._holder is not None or next(iter(self._waiting)) is not suspect:
            return False
        del self._waiting[suspect]
        self._holder = suspect
        return True

    def leave(self, suspect: object) -> None:
        """Give the slot back, or stop waiting. Safe twice, and for requests that never asked."""
        self._waiting.pop(suspect, None)
        if self._holder is suspect:
            self._holder = None
        if self._holder is None and self._waiting:
            next(iter(self._waiting.values()))()

    @property
    def is_empty(self) -> bool:
        """Whether no suspect has the slot or waits for it."""
        return self._holder is None and not self._waiting

    def check(self) -> None:
        assert self._holder not in self._waiting, "isolation: the holder does not wait"
