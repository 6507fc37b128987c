"""A server's snapshot, decoded."""

from dataclasses import dataclass

import msgspec

from penstock.core.errors import ConfigError
from penstock.frontend.watch.snapshot import PageSnapshot
from penstock.router.dispatch.journeys import Journey
from penstock.router.explain.explanation import Explanation


@dataclass(frozen=True, slots=True)
class Seen:
    """A snapshot with the latest requests, and the latest decisions oldest first."""

    snapshot: PageSnapshot
    requests: list[Journey]
    decisions: list[Explanation]

    @classmethod
    def read(cls, body: bytes) -> "Seen":
        """Decode a snapshot; raises ConfigError for another body."""
        try:
            snapshot = msgspec.json.decode(body, type=PageSnapshot)
            return cls(
                snapshot,
                msgspec.convert(snapshot.requests, list[Journey]),
                msgspec.convert(snapshot.decisions, list[Explanation]),
            )
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"--url: the answer is not Penstock's, or another version's: {error}"
            ) from error
