"""Routers of large deployments: many of them over simulated workers, and one alone in its process.

`routers` is the experiment `scale`, on virtual time; `alone` is `scale-router`, which takes CPU time and memory.
"""
