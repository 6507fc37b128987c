"""`penstock ps`, `penstock logs`, `penstock apply` and `penstock down`."""

import argparse
import math
from pathlib import Path
from typing import Any

from penstock.cli.arguments.flags import add_deployment, add_set
from penstock.core.errors import ConfigError

_LINES = 100


def add_watching(commands: Any) -> None:
    """Register `ps` and `logs`."""
    ps = commands.add_parser(
        "ps",
        help="list the deployments of this host and their processes",
        description="List your deployments on this host with their processes, those that were killed and left something included."
        " Where a deployment spans hosts and a frontend runs here, workers of other hosts are listed too.",
    )
    ps.add_argument("--name", metavar="NAME", help="one deployment alone")
    ps.add_argument("--json", action="store_true", help="print JSON")
    ps.set_defaults(run=_run_ps)
    logs = commands.add_parser(
        "logs",
        help="show what the processes of a deployment print",
        description="Show what the processes of a deployment have printed on this host, also of one that has ended. The log keeps"
        " the last 16 to 32 MiB.",
    )
    logs.add_argument("process", nargs="?", metavar="PROCESS", help="such as worker-1; without, all")
    logs.add_argument("-n", type=int, default=_LINES, metavar="N", help=f"lines (default {_LINES})")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="go on until the deployment ends, or Ctrl-C"
    )
    add_deployment(logs)
    logs.set_defaults(run=_run_logs)


def add_changing(commands: Any) -> None:
    """Register `apply` and `down`."""
    change = commands.add_parser(
        "apply",
        help="change a running deployment to another graph",
        description="Change a deployment of this host to a changed graph while requests go on: numbers of workers, roles, arguments of"
        " engines, the model's revision. Flags of `penstock up` stay in force. See docs/operations.md.",
        epilog="Exit code: 2 if the graph is wrong or a difference cannot be applied in place, and then nothing has changed; 1 if a new"
        " worker does not come up: the old ones stay.",
    )
    change.add_argument("file", type=Path, metavar="FILE", help="YAML, or Python that sets `graph`")
    change.add_argument("--dry-run", action="store_true", help="print what differs, and change nothing")
    add_set(change, "set a field, as for up")
    add_deployment(change)
    change.set_defaults(run=_run_apply)
    down = commands.add_parser(
        "down",
        help="end a deployment on this host",
        description="End a deployment on this host as Ctrl-C does: requests in flight finish first. Where it was killed, end and"
        " remove what it left. Without arguments the only one is ended, or the one that was started in this directory.",
    )
    down.add_argument("file", nargs="?", metavar="FILE", help="the graph's file that it was started from")
    add_deployment(down)
    down.add_argument("--now", action="store_true", help="end requests in flight too")
    down.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds until it is killed (default: what its graph allows for draining, and 10)",
    )
    down.set_defaults(run=_run_down)


def _run_ps(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.hosted.ps import show_processes  # noqa: PLC0415

    show_processes(name=options.name, as_json=options.json)
    return 0


def _run_logs(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.hosted.logs import show_logs  # noqa: PLC0415

    if options.n < 0:
        raise ConfigError(f"-n: must be >= 0, got {options.n}")
    show_logs(options.process, name=options.name, part=options.part, last=options.n, follow=options.follow)
    return 0


def _run_apply(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.hosted.apply import apply_graph  # noqa: PLC0415

    apply_graph(options.file, options.set, name=options.name, part=options.part, dry_run=options.dry_run)
    return 0


def _run_down(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.hosted.down import take_down  # noqa: PLC0415

    if options.timeout is not None and not (options.timeout >= 0 and math.isfinite(options.timeout)):
        raise ConfigError(f"--timeout: must be a number of seconds >= 0, got {options.timeout}")
    file = None if options.file is None else Path(options.file)
    take_down(file, name=options.name, part=options.part, now=options.now, timeout_s=options.timeout)
    return 0
