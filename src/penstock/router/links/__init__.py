"""Between two workers: whether KV can move, and how long it takes."""
