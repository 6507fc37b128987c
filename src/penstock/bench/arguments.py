"""Flags that several benches take."""

import argparse
from pathlib import Path


def add_directory(parser: argparse.ArgumentParser, flag: str, default: str, text: str) -> None:
    """Add a flag for a directory that is read; `default` is relative to the repository's root."""
    parser.add_argument(
        flag, type=Path, default=Path(default), metavar="DIR", help=f"{text} (default %(default)s)"
    )
