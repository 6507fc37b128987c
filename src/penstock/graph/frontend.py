"""Where users reach the deployment."""

import pydantic

from penstock.core.config import Config


class FrontendSpec(Config):
    """The OpenAI-compatible server: one port, shared by several processes."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network of this machine."""
    port: int = pydantic.Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    processes: int = pydantic.Field(default=1, ge=1, le=64)
    """Processes that share the port."""
