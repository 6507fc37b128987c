"""`penstock top`."""

import argparse
from typing import Any

from penstock.cli.arguments.flags import add_frontend, frontend_of


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "top",
        help="watch a running deployment in the terminal",
        description="Show workers with their KV, models, tenants, requests with their way, routing decisions and the planner's rounds of a"
        " running `penstock serve`, once a second. Sort, filter, and choose a row for its details, a worker's log too; q ends."
        " See docs/operations.md.",
    )
    add_frontend(parser)
    parser.add_argument("--once", action="store_true", help="show it once, as where stdout is no terminal")
    parser.add_argument("--json", action="store_true", help="print the server's JSON once")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.watching.top import show_top  # noqa: PLC0415

    show_top(frontend_of(options), once=options.once, as_json=options.json)
    return 0
