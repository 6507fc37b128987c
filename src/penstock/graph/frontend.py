"""The graph's frontend settings."""

import pydantic

from penstock.frontend.config import FrontendConfig
from penstock.graph.kubernetes import KubernetesSpec


class FrontendSpec(FrontendConfig):
    """The OpenAI-compatible server: one port, shared by one or more processes."""

    processes: int = pydantic.Field(default=1, ge=1, le=64)
    """Processes that share the port."""
    kubernetes: KubernetesSpec | None = None
    """What the frontends' pods get in Kubernetes beside what the graph's `kubernetes` gives all pods."""
