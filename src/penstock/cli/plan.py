"""`penstock plan`."""

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Register the subcommand."""
    from penstock.plan.arguments import add_arguments  # noqa: PLC0415

    parser = commands.add_parser(
        "plan",
        help="find the deployment with the highest request rate within latency targets",
        description="Find the best deployment of N devices: aggregated or disaggregated, parallelism, number of workers and step"
        " size. Searched by the latency model, confirmed by the simulator.",
        epilog="Exit code: 0 planned, 2 wrong input, or nothing fits or keeps the targets. See docs/plan.md.",
    )
    add_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.plan.command import run_command  # noqa: PLC0415
    from penstock.sim.deployment import warn_of_exact  # noqa: PLC0415

    warn_of_exact()
    return run_command(options)
