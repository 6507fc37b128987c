"""Routing policies of other systems, from their published formulas, to compare Penstock's with.

Four more come with Penstock: round-robin, random, least-loaded and power-of-two. Each policy gets the best inputs that
its authors' system would have: exact prefixes, and the requests that the router has sent and that have not ended.
"""

BASELINES = {
    "prefix-then-load": "benchmarks.baselines.prefix_then_load:PrefixThenLoad",
    "linear-blocks": "benchmarks.baselines.linear_blocks:LinearBlocks",
    "product": "benchmarks.baselines.product:Product",
    "explore-exploit": "benchmarks.baselines.explore_exploit:ExploreExploit",
    "weighted-scores": "benchmarks.baselines.weighted_scores:WeightedScores",
}
"""What to give as a policy, with the repository on the path."""

_ABLATED = "benchmarks.baselines.ablations"
ABLATIONS = {
    f"kv-without-{term}": f"{_ABLATED}:KvWithout{term.title().replace('_', '')}"
    for term in ("queue", "kv_wait", "prefill", "itl", "slowdown", "queue_externality", "kv_pressure")
} | {
    "kv-without-request-queue": f"{_ABLATED}:KvWithoutRequestQueue",
    "product-with-request-queue": f"{_ABLATED}:ProductWithRequestQueue",
}
"""`kv` without one of its parts, to measure that part; no baselines unless asked for."""
