"""Options that experiments share, and their bounds."""

import argparse
from pathlib import Path

from benchmarks.runner.runner import default_jobs
from penstock.core.errors import ConfigError


def add_simulations(parser: argparse.ArgumentParser) -> None:
    """Add the options of an experiment that simulates deployments in processes."""
    parser.add_argument(
        "--jobs", type=int, default=default_jobs(), metavar="N", help="processes (default: all cores)"
    )
    parser.add_argument(
        "--examples",
        type=Path,
        default=Path("examples"),
        metavar="DIR",
        help="graphs and profiles (default %(default)s)",
    )


def expect_at_least(options: argparse.Namespace, **least: int) -> None:
    """Check options by name, each number of those with several; one that was not given is right.

    Raises:
        ConfigError: one is smaller, or no number.
    """
    for name, bound in least.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not value >= bound:
                raise ConfigError(f"--{name.replace('_', '-')}: must be >= {bound}, got {value}")
