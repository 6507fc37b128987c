"""Stop strings in streamed text, found across any chunk borders and never given out, not even in part."""

from collections.abc import Sequence


class StopFinder:
    """Watches one output. The match that is complete first wins; of those that end together, the longest."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """Args: stops: at least one, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take the next text.

        Returns:
            The text that is certain to be before any stop string, and whether one is complete. After that,
            the rest is dropped and nothing more may be fed.
        """
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            return text[: min(matches)[1]], True
        keep = min(_partial_match(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep], False

    def finish(self) -> str:
        """Give what was held back: the output ended within what could have become a stop string."""
        text, self._held = self._held, ""
        return text


def _partial_match(text: str, stop: str) -> int:
    """Find where the longest end of `text` that begins `stop` starts; len(text) if none does."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)
