"""`penstock doctor`."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="say which engines and memory transports work on this host, and how fast",
        description="List the engines that run here, and test every transport between every pair of memory kinds, within a process"
        " and between two. Prints the reason for each that does not work, the command that mends it, and the host settings to"
        " change. Takes 5 to 10 s.",
        epilog="Exit code: 0, or 1 if a transfer failed that should work. See docs/engines.md and docs/transfer.md.",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all findings to this file too")
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="directory for the file test, which uses 64 MB briefly (default: the directory for temporary files)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.core import log  # noqa: PLC0415
    from penstock.doctor.command import run_command  # noqa: PLC0415

    log.configure("error", process="doctor")
    return run_command(options.json, options.directory)
