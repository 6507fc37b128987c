"""`penstock top`: a running deployment, once a second, until `q`."""

import argparse
import sys

from penstock.cli.admin import ask, ask_stream
from penstock.cli.parser import Parser, add_frontend, frontend_of
from penstock.cli.top_tables import TopSnapshot, plain
from penstock.deploy.control.local_connector import FrontendAddress


def add_top(parser: Parser) -> None:
    """Add the arguments of `penstock top`."""
    parser.description = (
        "Show workers with their KV, models, tenants, requests with their way, routing decisions and the planner's rounds of a"
        " running `penstock serve`, once a second. Sort, filter, and choose a row for its details, a worker's log too; q ends."
        " See docs/operations.md."
    )
    add_frontend(parser)
    parser.add_argument("--once", action="store_true", help="show it once, as where stdout is no terminal")
    parser.add_argument("--json", action="store_true", help="print the server's JSON once")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:

    show_top(frontend_of(options), once=options.once, as_json=options.json)
    return 0


_SILENT_S = 10.0


def show_top(server: FrontendAddress, *, once: bool, as_json: bool) -> None:
    """Show a deployment until `q` is pressed; once as plain text where `once` says so, or where stdin or stdout is no terminal.

    Raises:
        ConfigError: the server is of another version.
        RequestError: the server has no page, or asks for the admin token.
        Unavailable: no server answers.
    """
    body = ask(server, "/watch/snapshot")
    if as_json:
        sys.stdout.write(body.decode() + "\n")
        return
    first = TopSnapshot.read(body)
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stdout.writelines(f"{text}\n" for text in plain(first))
        return
    from penstock.cli.top_app import TopApp  # noqa: PLC0415 - takes 0.2 s

    TopApp(first, lambda: ask_stream(server, "/watch/events", timeout_s=_SILENT_S)).run()
