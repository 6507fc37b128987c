"""Several routers: many of them over simulated workers, one alone in its process, and a few over real processes.

`routers` is the experiment `scale`, on virtual time; `alone` is `scale-router`, which takes CPU time and memory; `served` is
`routers-served`, real processes.
"""
