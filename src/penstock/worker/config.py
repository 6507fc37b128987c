"""Settings of a worker process, whatever its engine."""

import pydantic

from penstock.core.config import Config
from penstock.runtime.config import EventConfig


class WorkerConfig(Config):
    load_interval_s: float = pydantic.Field(default=0.05, gt=0)
    """Shortest time between two load reports; a worker that becomes busy or idle says so at once."""
    load_refresh_s: float = pydantic.Field(default=1.0, gt=0)
    """Longest time between two load reports of a busy worker; sooner where requests came, went on to decode or ended."""
    drain_notice_s: float = pydantic.Field(default=0.1, ge=0)
    """How long a draining worker still accepts requests, until every frontend knows."""
    drain_timeout_s: float = pydantic.Field(default=30.0, ge=0)
    """How long requests under way may go on once the worker drains; then they are handed to other workers."""
    kv_events: bool = True
    """Tell routers what the prefix cache holds, where the engine does; without, they guess it from what they sent."""
    events: EventConfig = pydantic.Field(default_factory=EventConfig)
    """What is kept of the KV events for those who follow them."""
