"""What the loader and the offloader count of each tier."""

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounters:
    """Counts of one tier since start, as `KvTierCounts` has them."""

    hit_tokens: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0
    offloaded_blocks: int = 0
    dropped_blocks: int = 0
    late_loads: int = 0
    missing_blocks: int = 0
    prefetched_blocks: int = 0
    wasted_blocks: int = 0
