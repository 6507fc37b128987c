"""Bounds of the KV that sessions keep."""

from pydantic import Field

from penstock.core.config import Config


class SessionsConfig(Config):
    """Sessions of agents in one worker, whose KV stays on the device between their requests (docs/agents.md)."""

    kv_share: float = Field(default=0.5, ge=0, le=0.9)
    """Most of a worker's KV blocks that sessions keep between requests; past it the session unused for longest ends. 0: none is kept."""
    sessions_max: int = Field(default=1024, ge=1)
    """Sessions open in a worker at once; past it the one unused for longest ends."""
    ttl_s: float = Field(default=60.0, gt=0)
    """A session ends so long after its last request, where the client gives no `ttl_s`."""
    ttl_s_max: float = Field(default=3600.0, gt=0)
    """Largest `ttl_s` of a client or operator; more is refused."""
