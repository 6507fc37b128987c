"""What connects two roles' machines, so that moving KV between them can be priced."""

from typing import Self

import pydantic

from penstock.core.config import Config
from penstock.core.types import Role


class Link(Config):
    """A network path from each worker of one role to each worker of another."""

    source: Role
    """The role that holds the bytes."""
    target: Role
    """The role that wants them."""
    bandwidth_bytes_per_s: float = pydantic.Field(gt=0)
    """What one pair of workers gets when nobody else sends."""
    latency_s: float = pydantic.Field(default=0.0, ge=0)
    """Seconds before the first byte arrives."""

    def connects(self, other: Self) -> bool:
        return (self.source, self.target) == (other.source, other.target)
