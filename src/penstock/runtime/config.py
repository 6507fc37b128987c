"""Bounds and times of request plane, KV events and discovery."""

import random

from pydantic import Field

from penstock.core.config import Config


class EventConfig(Config):
    """How many KV events a worker keeps for its subscribers, and how a subscriber resyncs."""

    replay_batches_max: int = Field(default=4096, ge=0)
    """Event batches (one per engine step) kept for subscribers that miss the latest ones; with 0 they get a snapshot."""
    replay_hashes_max: int = Field(default=262_144, ge=1)
    """Block hashes in all kept batches together."""
    snapshot_chunk_hashes: int = Field(default=2048, ge=1)
    """Block hashes in one chunk of a snapshot."""
    snapshot_hashes_max: int = Field(default=16_777_216, ge=1)
    """Block hashes a subscriber accepts in one snapshot."""
    resync_jitter_s: float = Field(default=0.05, gt=0)
    """A subscriber that sees a gap waits a random part of this before it asks for a resync."""
    resync_timeout_s: float = Field(default=1.0, gt=0)
    """A subscriber without an answer asks again after half to all of this; doubles with every try."""
    resync_timeout_s_max: float = Field(default=30.0, gt=0)
    """Upper bound of the doubling."""
    early_batches_max: int = Field(default=1024, ge=0)
    """Batches beyond a gap that a subscriber keeps until it has those before; the others are sent again."""


class BroadcastConfig(Config):
    """Bounds and times of events and load reports that a broker carries."""

    linger_s: float = Field(default=0.005, ge=0)
    """A worker collects KV events for this long; a load report goes at once, with what was collected."""
    batches_max: int = Field(default=1024, ge=1)
    """Event batches that wait for the broker; beyond it all are dropped, and routers ask the worker for them."""
    repair_interval_s: float = Field(default=1.0, gt=0)
    """How often a worker tells each router over its connection what it should have by now; the router asks for what is missing."""


class PlaneConfig(Config):
    """Bounds and times of the request plane's connections."""

    window_tokens: int = Field(default=512, ge=1)
    """Tokens of one request that a worker may send before the frontend grants more."""
    stream_bytes_max: int = Field(default=1 << 20, ge=1024)
    """Bytes that a worker buffers for one request with a slow reader, plus the tokens of one step; beyond it the request is parked: it leaves the engine until
    the buffer is read."""
    connection_bytes_max: int = Field(default=2 << 20, ge=1024)
    """Bytes that a worker buffers for all requests of one frontend. Beyond half of it each request may use an equal share of that half; beyond all of it the
    largest buffers are dropped and their tokens computed again. Also the bytes that a frontend buffers for a worker that does not read."""
    write_buffer_bytes: int = Field(default=256 << 10, ge=1024)
    """With more bytes than this in a socket's write buffer, deltas are buffered and merged."""
    frame_bytes_max: int = Field(default=16 << 20, ge=1024)
    """The longest frame accepted, in bytes."""
    file_bytes_max: int = Field(default=64 << 20, ge=1024)
    """The largest model-card file fetched, in bytes."""
    requests_max: int = Field(default=16384, ge=1)
    """Unfinished requests of one frontend on one worker."""
    connections_max: int = Field(default=1024, ge=1)
    """Frontends connected to one worker."""
    connect_timeout_s: float = Field(default=2.0, gt=0)
    """Time to connect and authenticate."""
    heartbeat_interval_s: float = Field(default=2.0, gt=0)
    """A peer silent for this long is pinged."""
    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    """A peer silent for this long counts as lost; a killed process is noticed at once."""
    close_timeout_s: float = Field(default=1.0, gt=0)
    """Time that a closing worker gives its frontends to read what is buffered."""


class DiscoveryConfig(Config):
    """Bounds and times of the local hub's registry and of its clients."""

    lease_ttl_s: float = Field(default=5.0, gt=0)
    """A registration not renewed for this long is removed; also the time that workers have to register with a restarted hub."""
    linger_s: float = Field(default=0.5, ge=0)
    """A registration whose connection broke is removed after this, unless its worker connects again."""
    instances_max: int = Field(default=4096, ge=1)
    """Registrations in one hub."""
    connections_max: int = Field(default=4096, ge=1)
    """Clients of one hub, watchers among them."""
    frame_bytes_max: int = Field(default=4 << 20, ge=1024)
    """The longest message accepted, in bytes."""
    connect_timeout_s: float = Field(default=2.0, gt=0)
    """Time to connect, authenticate and register."""
    reconnect_delay_s: float = Field(default=0.05, gt=0)
    """A client that has lost the hub reconnects within this; doubles with every try."""
    reconnect_delay_s_max: float = Field(default=1.0, gt=0)
    """Upper bound of the doubling."""

    def retry_delay_s(self, tries: int, rng: random.Random) -> float:
        """Give the time to wait after `tries` further failures: half to all of a bound that doubles."""
        longest_s: float = min(self.reconnect_delay_s * 2 ** min(tries, 16), self.reconnect_delay_s_max)
        return longest_s * rng.uniform(0.5, 1.0)


class TracingConfig(Config):
    """OpenTelemetry traces, of frontends and workers; they need the extra `otel`."""

    endpoint: str = Field(default="http://127.0.0.1:4318", pattern=r"^https?://[^/\s]+(/\S*)?$")
    """Base URL of a collector that speaks OTLP by HTTP; OTEL_EXPORTER_OTLP_HEADERS gives headers, such as its key."""
    sample_share: float = Field(default=1.0, ge=0, le=1)
    """Share of traces that begin here which are recorded; a client's `traceparent` decides for its own."""
