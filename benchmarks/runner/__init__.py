"""Simulated runs for every experiment: `Run` describes one, `Runner` runs many in processes and keeps their figures.

The search for the largest rate is `penstock.plan.largest_rate`, which `penstock plan` uses too.
"""

from benchmarks.runner.cache import Cache, Figures
from benchmarks.runner.options import add_simulations, expect_at_least
from benchmarks.runner.run import DEPLOYMENTS, Description, GraphFiles, Run, Trouble, find_graph
from benchmarks.runner.runner import Runner, default_jobs
from benchmarks.runner.workload import RECORDED, SYNTHETIC, Workload

__all__ = [
    "DEPLOYMENTS",
    "RECORDED",
    "SYNTHETIC",
    "Cache",
    "Description",
    "Figures",
    "GraphFiles",
    "Run",
    "Runner",
    "Trouble",
    "Workload",
    "add_simulations",
    "default_jobs",
    "expect_at_least",
    "find_graph",
]
