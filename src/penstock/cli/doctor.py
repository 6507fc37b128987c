"""`penstock doctor`."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command to those of `penstock`."""
    parser = commands.add_parser(
        "doctor",
        help="say how memory can be moved here, and how fast",
        description="Try every transport between every two kinds of memory, within a process and between two, say why others"
        " do not work, and which settings of this host stand in the way. Takes about 10 s.",
        epilog="Exit code: 0, or 1 if a transfer failed that should work. See docs/transfer.md.",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all findings to this file too")
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="where files are tried, 64 MB for a moment (default: the directory for temporary files)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.core import log  # noqa: PLC0415
    from penstock.doctor.command import run_command  # noqa: PLC0415

    log.configure("error", process="doctor")
    return run_command(options.json, options.directory)
