"""`penstock key`."""

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "key",
        help="make an API key, and the hash of it for the key file",
        description="Make an API key for a client, and print its hash, which goes into the key file of `penstock serve --api-key-file`."
        " The key is stored nowhere. See docs/tenants.md.",
    )
    parser.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> int:
    from penstock.frontend.limits.keys import hash_of, new_key  # noqa: PLC0415

    key = new_key()
    print(f"for the client:   {key}\nfor the key file: {hash_of(key)}")  # noqa: T201 - command output
    return 0
