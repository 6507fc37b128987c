"""`penstock planner`."""

import argparse
from pathlib import Path
from typing import Any

from penstock.cli.arguments.flags import add_deployment, add_set
from penstock.core.errors import ConfigError

_LAST = 20
_OTHER = {
    "--slo-ttft": ("slo.ttft_s", "S", "another target of TTFT, in seconds"),
    "--slo-itl": ("slo.itl_s", "S", "another target of ITL, in seconds"),
    "--min-workers": ("planner.min_workers", "N", "other fewest workers of each role"),
    "--max-workers": ("planner.max_workers", "N", "other most workers of each role"),
}
"""Flag: (path in the graph, placeholder, help)."""


def add(commands: Any) -> None:
    """Register the subcommand and its own."""
    parser = commands.add_parser(
        "planner",
        help="show what the planner decided and why",
        description="Show what the planner of a running deployment decided and why, or decide recorded rounds again. See"
        " docs/planner.md.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    log = actions.add_parser(
        "log", help="list the last rounds", description="List the last rounds of the planner, one a line."
    )
    log.add_argument("-n", type=int, default=_LAST, metavar="N", help=f"how many (default {_LAST})")
    log.add_argument("--follow", action="store_true", help="go on with those that come, until Ctrl-C")
    log.set_defaults(run=_run_log)
    why = actions.add_parser(
        "why",
        help="explain one round",
        description="Explain one round of the planner: what it saw, expected, decided and did, and why not with fewer workers.",
    )
    why.add_argument(
        "which",
        nargs="?",
        metavar="ROLE|TIME|NUMBER",
        help="a role: its last change; a time such as 14:05: the last round then; a round's number (default: the last change)",
    )
    why.set_defaults(run=_run_why)
    for each in (log, why):
        each.add_argument("--file", type=Path, metavar="FILE", help="read a log instead, planner.jsonl")
        add_deployment(each, has_url=True)
        each.add_argument("--json", action="store_true", help="print the log's lines unchanged")
    again = actions.add_parser(
        "replay",
        help="decide the rounds of a log again",
        description="Decide the rounds of a log again, by this version and with other settings where given, and show the"
        " differences. What the rounds saw stays as it was.",
        epilog="Exit code without other settings, for a log of this version: 1 if a round differs.",
    )
    again.add_argument("file", type=Path, metavar="FILE", help="a deployment's planner.jsonl")
    for flag, (place, metavar, text) in _OTHER.items():
        again.add_argument(flag, dest=place, metavar=metavar, help=text)
    add_set(again, "another value of any field of the graph, as planner.cool_down_s=60")
    again.add_argument("--json", action="store_true", help="print each round that differs as JSON")
    again.set_defaults(run=_run_replay)


def _run_log(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.planner.log import find_log, show_log  # noqa: PLC0415

    if options.n < 1:
        raise ConfigError(f"-n: must be >= 1, got {options.n}")
    path = find_log(name=options.name, url=options.url, part=options.part, file=options.file)
    show_log(path, last=options.n, follow=options.follow, as_json=options.json)
    return 0


def _run_why(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.planner.log import find_log, show_why  # noqa: PLC0415

    path = find_log(name=options.name, url=options.url, part=options.part, file=options.file)
    show_why(path, options.which, as_json=options.json)
    return 0


def _run_replay(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.planner.replay import replay  # noqa: PLC0415
    from penstock.graph import Overrides  # noqa: PLC0415

    overrides = Overrides(options.set)
    for flag, (place, _, _) in _OTHER.items():
        if (value := getattr(options, place)) is not None:
            overrides.assign(place, value, flag=flag)
    return replay(options.file, overrides, as_json=options.json)
