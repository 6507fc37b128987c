"""`penstock key`."""

import argparse

from penstock.cli.parser import Parser
from penstock.frontend.limits.keys import hash_of, new_key


def add_key(parser: Parser) -> None:
    """Add the arguments of `penstock key`."""
    parser.description = (
        "Make an API key for a client, and print its hash, which goes into the key file of `penstock serve --api-key-file`."
        " The key is stored nowhere. See docs/tenants.md."
    )
    parser.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> int:

    key = new_key()
    print(f"for the client:   {key}\nfor the key file: {hash_of(key)}")  # noqa: T201 - command output
    return 0
