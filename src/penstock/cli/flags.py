"""Flags that several commands have."""

from typing import Any


def add_set(parser: Any, text: str) -> None:
    """Add `--set K=V`, as often as wanted.

    Args:
        parser: the command's.
        text: of its help.
    """
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help=text)


def add_log_level(parser: Any) -> None:
    """Add `--log-level`."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="log on stderr (default warning); debug has each routing decision, for `penstock explain --replay`",
    )
