"""`penstock apply`: changes a deployment of this host to another graph while requests go on."""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.cli.parser import Parser, add_deployment, add_set
from penstock.cli.text import columns
from penstock.core.errors import ConfigError, Unavailable, from_info
from penstock.deploy.control.hosted import Hosted, choose, hosted
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME, Difference, RolloutView
from penstock.graph import Graph, Overrides, load


def add_apply(parser: Parser) -> None:
    """Add the arguments of `penstock apply`."""
    parser.description = (
        "Change a deployment of this host to a changed graph while requests go on: numbers of workers, roles, arguments of"
        " engines, the model's revision. Flags of `penstock up` stay in force. See docs/operations.md."
    )
    parser.epilog = (
        "Exit code: 2 if the graph is wrong or a difference cannot be applied in place, and then nothing has changed; 1 if a new"
        " worker does not come up: the old ones stay."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML, or Python that sets `graph`")
    parser.add_argument("--dry-run", action="store_true", help="print what differs, and change nothing")
    add_set(parser, "set a field, as for up")
    add_deployment(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:

    apply_graph(options.file, options.set, name=options.name, part=options.part, dry_run=options.dry_run)
    return 0


_COLUMNS = ("role", "field", "old", "new", "action")
_FLAG = "penstock up"


def apply_graph(
    file: Path, settings: Sequence[str], *, name: str | None, part: str | None, dry_run: bool
) -> None:
    """Print what differs, and unless `dry_run` change it and wait until that is done.

    Args:
        file: the graph.
        settings: of `--set`; what `penstock up` was given counts too, where these do not set the same.
        name: the deployment; None is the one that was started from this file, else the one with the graph's name.
        part: which part of the deployment, where several run here.
        dry_run: change nothing.

    Raises:
        ConfigError: the graph is wrong, several deployments fit, this host follows a worker's leader, or a difference cannot be
            applied in place.
        RequestError: another `penstock apply` is under way, or there is no room for a new worker.
        Unavailable: no deployment runs, or the change failed.
    """
    found = _find(file, settings, name, part)
    _refuse_follower(found)
    graph = _graph_for(found, file, settings)
    if found.record is not None and graph.name != found.record.name:
        raise ConfigError(
            f"{file}: name: the deployment is called {found.record.name}, the graph {graph.name}; start another deployment for it"
        )
    asyncio.run(_apply(LocalConnector(found.directory / SOCKET_NAME), graph, dry_run=dry_run))


def _find(file: Path, settings: Sequence[str], name: str | None, part: str | None) -> Hosted:
    living = [each for each in hosted() if each.is_live]
    if name is not None:
        return choose(living, name=name, part=part)
    try:
        return choose(living, file=file, part=part)
    except Unavailable:
        return choose(living, name=load(file, Overrides(settings)).name, part=part)


def _refuse_follower(found: Hosted) -> None:
    """Raise ConfigError for a node that follows: its leader's supervisor has the workers."""
    if found.record is not None and found.record.follows:
        raise ConfigError(
            f"{found.name}: this host is {found.record.follows} and follows the leader's worker; run penstock apply on the leader's host"
        )


def _graph_for(found: Hosted, file: Path, settings: Sequence[str]) -> Graph:
    """Read the graph with the flags of `penstock up`, and the model's directory as the supervisor finds it."""
    overrides = Overrides(settings)
    given: dict[str, Any] = {}
    if found.record is not None and found.record.origin is not None:
        given = found.record.origin.overrides
    own = overrides.assigned()
    for place, value in given.items():
        if not any(_overlaps(place, each) for each in own):
            overrides.assign(place, value, flag=_FLAG)
    graph = load(file, overrides)
    model = Path(graph.model).expanduser()
    return graph.model_copy(update={"model": str(model.resolve())}) if model.is_dir() else graph


def _overlaps(one: str, other: str) -> bool:
    parts, others = one.split("."), other.split(".")
    length = min(len(parts), len(others))
    return parts[:length] == others[:length]


async def _apply(connector: LocalConnector, graph: Graph, *, dry_run: bool) -> None:
    differences, rollout = await connector.apply(graph.model_dump_json(), dry_run=dry_run)
    if not differences:
        _write(["nothing differs"])
        return
    _write(table(differences))
    refused = [each for each in differences if each.refusal]
    if refused:
        raise ConfigError(
            "\n".join(
                f"{_place(each)}: is {each.old}, the file has {each.new}: {each.refusal}; set it back, or end the deployment with"
                " penstock down and start it again"
                for each in refused
            )
        )
    if not dry_run:
        await _follow(connector, rollout)


async def _follow(connector: LocalConnector, rollout: RolloutView) -> None:
    """Print the lines of a rollout until it ends; raises what it failed for."""
    number, shown = rollout.number, 0
    while True:
        _write(rollout.lines[shown:])
        shown = max(shown, len(rollout.lines))
        if rollout.is_over:
            break
        rollout = await connector.rollout(shown)
        if rollout.number != number:
            raise Unavailable("another penstock apply has begun meanwhile; penstock ps shows the workers")
    if rollout.error is not None:
        raise from_info(rollout.error)


def table(differences: Sequence[Difference]) -> Iterable[str]:
    """Format a line for each difference, under a line of titles."""
    rows = [
        _COLUMNS,
        *(
            (each.role, each.field or "(role)", each.old, each.new, each.action or "refused")
            for each in differences
        ),
    ]
    yield from columns(rows)


def _place(each: Difference) -> str:
    role = "" if each.role == "all" else f"roles.{each.role}"
    return ".".join(filter(None, (role, each.field)))


def _write(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
