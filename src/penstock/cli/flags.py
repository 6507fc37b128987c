"""Flags shared by several commands."""

from typing import Any


def add_set(parser: Any, text: str) -> None:
    """Add the repeatable flag `--set K=V`.

    Args:
        parser: the command's parser.
        text: help text.
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
