"""Poison-request isolation: suspects of killing workers run one at a time, so that the next loss shows the culprit."""

from collections.abc import Callable


class PoisonIsolation:
    """One place, and those who wait for it, first come, first served. One event loop owns it."""

    def __init__(self) -> None:
        self._holder: object | None = None
        self._waiting: dict[object, Callable[[], None]] = {}

    def enter(self, suspect: object, wake: Callable[[], None]) -> bool:
        """Take the place if it is free and nobody came before; else `wake` is called once it may be.

        Whoever asked calls `leave` in the end, whether it got the place or not.
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
        """Give the place back, or wait no longer. Safe twice, and for those who never asked."""
        self._waiting.pop(suspect, None)
        if self._holder is suspect:
            self._holder = None
        if self._holder is None and self._waiting:
            next(iter(self._waiting.values()))()

    @property
    def is_empty(self) -> bool:
        """Whether nobody has the place or waits for it."""
        return self._holder is None and not self._waiting

    def check(self) -> None:
        assert self._holder not in self._waiting, "isolation: nobody waits for the place it has"
