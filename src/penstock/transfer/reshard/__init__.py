"""Which bytes of another worker's KV make up one's own, where their layouts differ."""

from penstock.transfer.reshard.moves import RankMove, ReshardPlan, mismatch, plan, region_bytes

__all__ = ["RankMove", "ReshardPlan", "mismatch", "plan", "region_bytes"]
