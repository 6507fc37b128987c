"""Links between workers: whether KV can move over each, and how fast."""
