"""The graph's frontend settings."""

import pydantic

from penstock.frontend.config import FrontendConfig


class FrontendSpec(FrontendConfig):
    """The OpenAI-compatible server: one port, shared by one or more processes."""

    processes: int = pydantic.Field(default=1, ge=1, le=64)
    """Processes that share the port."""
