"""The KV tiers below an engine's device: their configuration, and what makes them from it."""

from penstock.engine.kv_tiers.config import DiskConfig, KvConfig, ObjectConfig
from penstock.engine.kv_tiers.maker import TierMaker, tier_maker
from penstock.engine.kv_tiers.size import Size, TierSize

__all__ = [
    "DiskConfig",
    "KvConfig",
    "ObjectConfig",
    "Size",
    "TierMaker",
    "TierSize",
    "tier_maker",
]
