"""Routing policies of other systems, from their published formulas, to compare Penstock's with.

Four more come with Penstock: round-robin, random, least-loaded and power-of-two. Each policy gets the best inputs that
its authors' system would have: exact prefixes, and the requests that the router has sent and that have not ended.
"""

BASELINES = {
    "prefix-then-load": "baselines.prefix_then_load:PrefixThenLoad",
    "linear-blocks": "baselines.linear_blocks:LinearBlocks",
    "product": "baselines.product:Product",
    "explore-exploit": "baselines.explore_exploit:ExploreExploit",
    "weighted-scores": "baselines.weighted_scores:WeightedScores",
}
"""What to give as a policy, with this directory's parent on the path."""

ABLATIONS = {
    f"kv-without-{what}": f"baselines.ablations:KvWithout{what.title().replace('_', '')}"
    for what in ("hold", "queue", "kv_wait", "prefill", "itl", "slowdown", "queue_externality", "kv_pressure")
} | {"product-with-hold": "baselines.ablations:ProductWithHold"}
"""`kv` without one of its parts, to measure that part; no baselines unless asked for."""
