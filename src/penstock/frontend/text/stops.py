"""Finds stop strings in streamed text across chunks; no part of a stop string is given out."""

from collections.abc import Sequence

from penstock.frontend.parsing.source import held_from


class StopFinder:
    """Searches one output. The match that ends first wins; of matches with the same end, the longest."""

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        """Args: stops: at least one, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that was found."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Search the next text.

        Returns:
            (text before any stop string, whether a stop string was found). After a match the rest is dropped, and `feed`
                must not be called again.
        """
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            end, at = min(matches)
            self.found = text[at:end]
            return text[:at], True
        keep = min(held_from(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep], False

    def finish(self) -> str:
        """Return held-back text: a partial match at the end of the output."""
        text, self._held = self._held, ""
        return text
