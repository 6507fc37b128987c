"""`penstock simulate`."""

import argparse
from typing import Any

from penstock.cli.arguments.flags import add_set


def add(commands: Any) -> None:
    """Register the subcommand."""
    from penstock.sim.arguments import add_arguments  # noqa: PLC0415

    parser = commands.add_parser(
        "simulate",
        help="run a workload on a simulated deployment",
        description="Run a workload on a simulated deployment: the real router and workers, on virtual time.",
        epilog="Exit code: 0 simulated, 1 no request completed, 2 wrong input, 130 interrupted. See docs/simulation.md.",
    )
    add_arguments(parser)
    add_set(parser, "set a field of the graph, as for serve")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.core import log  # noqa: PLC0415
    from penstock.sim.command import run_command  # noqa: PLC0415
    from penstock.sim.deployment import warn_of_exact  # noqa: PLC0415

    log.configure("error", process="simulate")
    warn_of_exact()
    return run_command(options)
