"""Whether a server gets requests: health checks, a circuit breaker, and trials of a server that failed."""
