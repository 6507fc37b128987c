"""`penstock explain`."""

import argparse
from pathlib import Path
from typing import Any

from penstock.cli.arguments.flags import add_frontend, frontend_of
from penstock.core.errors import ConfigError


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "explain",
        help="show routing decisions",
        description="Show a running server's routing decision about a request, or its latest ones; or replay the decisions of a"
        " log. See docs/routing.md.",
        epilog="Exit code of --replay without --policy: 1 if a decision differs.",
    )
    add = parser.add_argument
    add("request_id", nargs="?", metavar="REQUEST_ID", help="the answer's id, such as chatcmpl-0123")
    add_frontend(parser, " or of `penstock router`")
    add(
        "--last",
        type=int,
        metavar="N",
        help="without REQUEST_ID: number of latest decisions (default 16, at most 64)",
    )
    add("--json", action="store_true", help="print the server's JSON unchanged")
    add(
        "--replay",
        type=Path,
        metavar="FILE",
        help="replay a log written with --log-level debug and PENSTOCK_LOG_FORMAT=json",
    )
    add(
        "--policy",
        metavar="NAME",
        help="for --replay: use this policy instead (default: that of the log)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.explain import ask, replay  # noqa: PLC0415
    from penstock.frontend.http.admin import LATEST_MAX  # noqa: PLC0415

    if options.replay is None:
        if options.policy is not None:
            raise ConfigError(
                "--policy: is for --replay FILE, which decides again; what runs has decided already"
            )
        if options.request_id is not None and options.last is not None:
            raise ConfigError(
                f"{options.request_id} and --last: give one of them: one request, or the latest"
            )
        if options.request_id == "":
            raise ConfigError("REQUEST_ID: must be an answer's id, such as chatcmpl-0123, got ''")
        if options.last is not None and not 1 <= options.last <= LATEST_MAX:
            raise ConfigError(f"--last: must be 1 to {LATEST_MAX}, got {options.last}")
        ask(frontend_of(options), options.request_id, options.last, as_json=options.json)
        return 0
    if options.request_id is not None:
        raise ConfigError(f"{options.request_id} and --replay: explain one request, or replay a log")
    if options.last is not None or options.json:
        flag = "--json" if options.last is None else "--last"
        raise ConfigError(f"{flag}: is for what a server says; --replay makes all decisions of its log again")
    return replay(options.replay, options.policy)
