"""`penstock kv`."""

import argparse
from pathlib import Path
from typing import Any

from penstock.cli.arguments.flags import add_frontend, frontend_of


def add(commands: Any) -> None:
    """Register the subcommand and its own."""
    parser = commands.add_parser(
        "kv",
        help="show and manage the KV caches of running workers",
        description="Show what the KV caches of a running server's workers keep, and pin, prefetch, evict or flush prefixes."
        " Engines paged and mock. See docs/agents.md and docs/kv-tiers.md.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = _adder(actions)
    add("ls", "list each worker's tiers, sessions and pins")
    add("stats", "show what each tier and the sessions have done since the worker's start")
    flush = add("flush", "clear the cache of all tiers; sessions and pins end")
    flush.add_argument("--tier", metavar="TIER", help="device: on the device alone (default: all tiers)")
    pin = add("pin", "compute a prefix where no worker has it, and keep it on the device")
    pin.add_argument("held", metavar="NAME", help="what the pin is called; another of this name is replaced")
    _add_prompt(pin)
    pin.add_argument(
        "--ttl", type=float, metavar="S", help="the pin ends after so many seconds (default: sessions.ttl_s)"
    )
    unpin = add("unpin", "end a pin, or an agent's session")
    unpin.add_argument("held", metavar="NAME", help="the pin's name, or the session's id")
    unpin.add_argument("--session", action="store_true", help="NAME is a session")
    unpin.add_argument("--tenant", default="", metavar="TENANT", help="for --session: its tenant")
    prefetch = add("prefetch", "have a worker compute a prefix, or load it from lower tiers", by_worker=False)
    _add_prompt(prefetch)
    evict = add("evict", "drop a prefix from devices, as far as nothing uses it")
    _add_prompt(evict)


def _adder(actions: Any) -> Any:
    def add(name: str, text: str, *, by_worker: bool = True) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=f"{text}.".capitalize()
        )
        add_frontend(parser)
        parser.add_argument("--json", action="store_true", help="print the server's JSON unchanged")
        if by_worker:
            parser.add_argument(
                "--worker", metavar="WORKER", help="its name in GET /admin/workers (default: every worker)"
            )
        parser.set_defaults(run=_run, action=name, worker=None)
        return parser

    return add


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", metavar="TEXT", help="the prefix as of /v1/completions")
    given.add_argument("--text-file", type=Path, metavar="FILE", help="a file with such a text")
    given.add_argument(
        "--messages", type=Path, metavar="FILE", help="a JSON file with the messages of a chat"
    )
    given.add_argument("--tokens", type=Path, metavar="FILE", help="a JSON file with a list of token ids")
    parser.add_argument("--model", metavar="MODEL", help="needed where several models are served")


def _run(options: argparse.Namespace) -> int:
    from penstock.deploy.commands import kv  # noqa: PLC0415

    return 0 if kv.run(options.action, frontend_of(options), options) else 1
