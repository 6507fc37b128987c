"""What may be set for the KV tiers of a role."""

from typing import Any

import pydantic

from penstock.core.config import Config
from penstock.core.types.events import Tier
from penstock.engine.kv_tiers.size import Size, TierSize


class DiskConfig(Config):
    """A KV tier on a local drive; `PATH:SIZE` is short for both fields, and a size alone is only simulated."""

    path: str = ""
    """File of the tier; each worker has one of its own, PATH.ROLE.NUMBER. Its content is kept across restarts."""
    size: Size = TierSize(0, "B")
    """Of each worker's file, reserved at the start."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _unfold(cls, data: Any) -> Any:
        if isinstance(data, str | int | float) and not isinstance(data, bool):
            path, _, size = str(data).rpartition(":")
            return {"path": path, "size": size}
        return data


class KvConfig(Config):
    """KV tiers below the devices of each worker: a size as `8GiB`, or a multiple of the device's blocks as `5x`; 0 is no tier."""

    host: Size = TierSize(0, "B")
    """Memory of the worker's machine: keeps blocks of requests that leave the batch, and loads them where that is quicker than computing."""
    disk: DiskConfig = DiskConfig()
    """Local drive, likewise."""
    object: Size = TierSize(0, "B")
    """Object store. Only simulated in this version."""

    def present(self) -> dict[Tier, TierSize]:
        """Return the configured tiers, nearest first."""
        sizes = {Tier.HOST: self.host, Tier.DISK: self.disk.size, Tier.OBJECT: self.object}
        return {tier: size for tier, size in sizes.items() if size}
