"""Routing policies side by side, on the simulator: `kv` against the baselines under `benchmarks/baselines`."""

from benchmarks.policies.command import add_arguments, run

__all__ = ["add_arguments", "run"]
