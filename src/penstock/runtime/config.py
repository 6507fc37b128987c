"""The bounds and times of the planes and of discovery."""

from pydantic import Field

from penstock.core.config import Config


class EventConfig(Config):
    """How much a worker keeps for its subscribers, and how a subscriber asks again."""

    replay_batches_max: int = Field(default=4096, ge=1)
    """Event batches (one per engine step) kept for subscribers that lack the latest ones."""
    replay_hashes_max: int = Field(default=262_144, ge=1)
    """Block hashes in all kept batches together."""
    snapshot_chunk_hashes: int = Field(default=8192, ge=1)
    """Block hashes in one chunk of a snapshot."""
    snapshot_hashes_max: int = Field(default=16_777_216, ge=1)
    """Block hashes a subscriber accepts in one snapshot."""
    resync_jitter_s: float = Field(default=0.05, gt=0)
    """A subscriber that sees a gap waits a random part of this before it asks."""
    resync_timeout_s: float = Field(default=1.0, gt=0)
    """How long it waits for the answer before it asks again (half to all of it); doubles with every try."""
    resync_timeout_s_max: float = Field(default=30.0, gt=0)
    """Upper bound of the doubling."""
