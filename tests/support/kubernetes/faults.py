"""Faults of the API server, by seed."""

import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Faults:
    """What goes wrong, each with its share of requests or, for `drop_watch`, of watch events."""

    rng: random.Random = field(default_factory=lambda: random.Random(1))
    token: str = ""
    """Whose requests meet them; empty: everybody's."""
    error: float = 0.0
    """Answers 500, before or after the request has had its effect."""
    too_many: float = 0.0
    """Answers 429 with Retry-After."""
    retry_after_s: int = 1
    unavailable: float = 0.0
    """Answers 503, as a proxy before a server that is away."""
    drop: float = 0.0
    """Closes the connection without an answer, after the request has had its effect."""
    drop_watch: float = 0.0
    """Ends a watch in the middle of an event."""
    compact_watch: float = 0.0
    """Ends a watch with 410 Gone, as a server whose watch cache has moved on."""
    slow_s: float = 0.0
    """Waits up to so long before each answer."""

    count: int = 0
    """Faults so far."""

    def hits(self, share: float) -> bool:
        is_hit = share > 0 and self.rng.random() < share
        self.count += is_hit
        return is_hit
