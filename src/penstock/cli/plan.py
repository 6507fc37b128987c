"""`penstock plan`."""

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Add the command to those of `penstock`."""
    from penstock.plan.arguments import add_arguments  # noqa: PLC0415

    parser = commands.add_parser(
        "plan",
        help="find the deployment that serves most within latency targets",
        description="Find what to make of so many devices: whole requests or prefill and decode apart, how spread, how many"
        " workers, how large steps. Searched by the latency model, confirmed by the simulator.",
        epilog="Exit code: 0 planned, 2 wrong input, or nothing fits or keeps the targets. See docs/plan.md.",
    )
    add_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.plan.command import run_command  # noqa: PLC0415

    return run_command(options)
