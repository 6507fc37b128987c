"""Regions that are workers of each other, simulated: what prefixes crossing as a summary are worth, and a region that is lost.

`command` is the experiment `regions`; `link` and `world` put the real routers, links and summaries on virtual time.
"""

from benchmarks.regions.command import add_arguments, run

__all__ = ["add_arguments", "run"]
