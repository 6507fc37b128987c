"""How long requests of a model could not leave the queue because of decode workers."""


class DecodeWait:
    """Adds up the time in which no decode worker had a batch slot for prompts of prefill workers. The caller gives the times."""

    def __init__(self) -> None:
        """Begin at 0."""
        self._total_s = 0.0
        self._since_s: float | None = None

    def note(self, now_s: float, *, is_full: bool) -> None:
        """Note whether decode workers are full from now on."""
        self._total_s = self.total_s(now_s)
        self._since_s = now_s if is_full else None

    def total_s(self, now_s: float) -> float:
        """Give the seconds so far."""
        return self._total_s if self._since_s is None else self._total_s + now_s - self._since_s
