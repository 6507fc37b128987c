"""Streaming calls to a worker: many requests on one connection."""
