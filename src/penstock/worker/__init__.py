"""Floor 5: a worker, which drives one engine of any kind and serves it to frontends."""
