"""The bounds and times of the planes and of discovery."""

from pydantic import Field

from penstock.core.config import Config


class EventConfig(Config):
    """How much a worker keeps for its subscribers, and how a subscriber asks again."""

    replay_batches_max: int = Field(default=4096, ge=0)
    """Event batches (one per engine step) kept for subscribers that lack the latest ones; with 0 they get all there is."""
    replay_hashes_max: int = Field(default=262_144, ge=1)
    """Block hashes in all kept batches together."""
    snapshot_chunk_hashes: int = Field(default=2048, ge=1)
    """Block hashes in one chunk of a snapshot."""
    snapshot_hashes_max: int = Field(default=16_777_216, ge=1)
    """Block hashes a subscriber accepts in one snapshot."""
    resync_jitter_s: float = Field(default=0.05, gt=0)
    """A subscriber that sees a gap waits a random part of this before it asks."""
    resync_timeout_s: float = Field(default=1.0, gt=0)
    """How long it waits for the answer before it asks again (half to all of it); doubles with every try."""
    resync_timeout_s_max: float = Field(default=30.0, gt=0)
    """Upper bound of the doubling."""


class PlaneConfig(Config):
    """Bounds and times of the request plane's connections."""

    window_tokens: int = Field(default=512, ge=1)
    """Tokens of one request that a frontend takes before it has granted more."""
    stream_bytes_max: int = Field(default=1 << 20, ge=1024)
    """What a worker holds for one request whose reader is slow, in bytes, and a step's tokens more; beyond it the request leaves its engine until that is read."""
    connection_bytes_max: int = Field(default=2 << 20, ge=1024)
    """The same for all requests of one frontend: past half of it each has an equal share of that half, past all of it the largest are dropped and computed again. Also
    what a frontend buffers for a worker that does not read, in bytes."""
    write_buffer_bytes: int = Field(default=256 << 10, ge=1024)
    """Above this much in a socket's write buffer, deltas are held and merged."""
    frame_bytes_max: int = Field(default=16 << 20, ge=1024)
    """The longest frame accepted, in bytes."""
    file_bytes_max: int = Field(default=64 << 20, ge=1024)
    """The largest model-card file fetched, in bytes."""
    requests_max: int = Field(default=16384, ge=1)
    """Requests of one frontend under way on one worker."""
    connections_max: int = Field(default=1024, ge=1)
    """Frontends connected to one worker."""
    connect_timeout_s: float = Field(default=2.0, gt=0)
    """For connecting and shaking hands."""
    heartbeat_interval_s: float = Field(default=2.0, gt=0)
    """A peer that has been silent for this long is pinged."""
    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    """A peer that has been silent for this long is lost; a killed process is noticed at once, without it."""
    close_timeout_s: float = Field(default=1.0, gt=0)
    """What a closing worker waits for its frontends to take what is buffered."""


class DiscoveryConfig(Config):
    """Bounds and times of the registry that the local hub keeps, and of its clients."""

    lease_ttl_s: float = Field(default=5.0, gt=0)
    """A registration not renewed for this long is dropped; also how long a restarted hub is waited for."""
    linger_s: float = Field(default=0.5, ge=0)
    """A registration whose connection broke is dropped after this, unless its worker connects again."""
    instances_max: int = Field(default=4096, ge=1)
    """Registrations in one hub."""
    connections_max: int = Field(default=4096, ge=1)
    """Clients of one hub, watchers among them."""
    frame_bytes_max: int = Field(default=4 << 20, ge=1024)
    """The longest message accepted, in bytes."""
    connect_timeout_s: float = Field(default=2.0, gt=0)
    """For connecting, shaking hands and registering."""
    reconnect_delay_s: float = Field(default=0.05, gt=0)
    """After losing the hub, a client tries again within this; doubles with every try."""
    reconnect_delay_s_max: float = Field(default=1.0, gt=0)
    """Upper bound of the doubling."""
