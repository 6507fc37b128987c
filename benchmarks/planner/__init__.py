"""The planner against other strategies, simulated: SLO attainment, GPU-hours and changes of direction."""

from benchmarks.planner.command import add_arguments, run

__all__ = ["add_arguments", "run"]
