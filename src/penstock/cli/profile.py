"""`penstock profile`."""

import argparse
from typing import Any

from penstock.cli.arguments.flags import add_set


def add(commands: Any) -> None:
    """Register the subcommand."""
    from penstock.profiling.arguments import add_arguments  # noqa: PLC0415

    parser = commands.add_parser(
        "profile",
        help="measure an engine and fit the latency model",
        description="Measure an engine in this process, or an OpenAI-compatible endpoint by URL, and fit the latency"
        " model that the router and the simulator use.",
    )
    add_arguments(parser)
    add_set(parser, "set a field of the engine, as for serve")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.core import log  # noqa: PLC0415
    from penstock.profiling.command import run_command  # noqa: PLC0415

    log.configure("critical", process="profile")
    return run_command(options)
