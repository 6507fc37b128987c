"""The bounds of transport `tcp`."""

from pydantic import Field

from penstock.core.config import Config


class TcpConfig(Config):
    """What peers may have under way here at once by TCP, and how bytes are cut."""

    streams: int = Field(default=2, ge=1)
    """Streams to one peer that share one large transfer of this agent."""
    streams_per_peer_max: int = Field(default=16, ge=1)
    """Streams that one peer may open, each with a thread while bytes move; what it asks for beyond waits there."""
    streams_max: int = Field(default=256, ge=1)
    """Streams to and from all peers together; more are refused."""
    window: int = Field(default=64, ge=1, le=128)
    """Small transfers to one peer under way at once; the others wait their turn."""
    piece_bytes_max: int = Field(default=64 << 20, ge=1 << 20)
    """The most that one stream moves before another transfer has its turn, and so the most under way on each."""
