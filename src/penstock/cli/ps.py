"""`penstock ps`: the deployments of this user on this host, and their processes."""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.admin import ask
from penstock.cli.parser import Parser
from penstock.cli.text import age
from penstock.core.clock import wall_time_s
from penstock.core.errors import PenstockError, Unavailable
from penstock.deploy.control.hosted import Hosted, hosted
from penstock.deploy.control.local_connector import FrontendAddress, LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME, ProcessView


def add_ps(parser: Parser) -> None:
    """Add the arguments of `penstock ps`."""
    parser.description = (
        "List your deployments on this host with their processes, those that were killed and left something included."
        " Where a deployment spans hosts and a frontend runs here, workers of other hosts are listed too."
    )
    parser.add_argument("--name", metavar="NAME", help="one deployment alone")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:

    show_processes(name=options.name, as_json=options.json)
    return 0


_ENTRY_S = 1.0
_KEY_SHOWN = 6
_NAME_WIDTH = 12
"""Characters of a name's column, unless a name is longer."""


class RemoteWorkerView(msgspec.Struct, frozen=True):
    """A worker of another host, as a frontend of this host sees it."""

    name: str
    role: str
    condition: str
    host: str
    address: str


class LinkView(msgspec.Struct, frozen=True):
    """A link to another region, as a frontend of this host sees it; `round_trip_s` is measured, 0 before the first answer."""

    region: str
    condition: str
    round_trip_s: float
    frontends: int
    healthy: int


class DeploymentView(msgspec.Struct, frozen=True):
    """What is known of one deployment.

    Attributes:
        state: `running`; `starting`; `silent`, where its supervisor lives and does not answer; `killed`, where it does not live.
        follows: which node of a worker over several nodes it is, as `node 1 of 2`; empty where it is none that follows.
        left: process groups that a killed deployment has left.
        problem: why something about it is not known; empty where all is.
    """

    name: str
    state: str
    directory: str
    pid: int | None = None
    age_s: float = 0.0
    url: str = ""
    graph: str = ""
    processes: tuple[ProcessView, ...] = ()
    remote: tuple[RemoteWorkerView, ...] = ()
    links: tuple[LinkView, ...] = ()
    left: int = 0
    problem: str = ""
    follows: str = ""


def show_processes(*, name: str | None, as_json: bool) -> None:
    """Print the deployments, or the one called `name`, with their processes.

    Raises:
        Unavailable: there is none of this name.
    """
    found = [each for each in hosted() if name in {None, each.name}]
    if not found and name is not None:
        raise Unavailable(f"no deployment called {name} of this user runs on this host")
    listed = [_look(each) for each in found]
    if as_json:
        _write([msgspec.json.encode(listed).decode()])
    elif listed:
        _write(table(listed))
    else:
        sys.stderr.write("penstock: no deployment of this user runs on this host\n")


def _look(each: Hosted) -> DeploymentView:
    record = each.record
    follows = "" if record is None else record.follows
    listed = DeploymentView(
        name=each.name,
        state="killed" if not each.is_live else "running" if follows else "starting",
        directory=str(each.directory),
        pid=None if record is None else record.pid,
        age_s=0.0 if record is None else max(0.0, wall_time_s() - record.started_s),
        graph="" if record is None or record.origin is None else record.origin.file,
        left=each.left(),
        follows=follows,
    )
    if not each.is_live or follows:
        return listed
    connector = LocalConnector(each.directory / SOCKET_NAME, entry_s=_ENTRY_S)
    try:
        processes = asyncio.run(connector.processes())
    except PenstockError as error:
        has_socket = (each.directory / SOCKET_NAME).exists()
        return msgspec.structs.replace(
            listed, state="silent" if has_socket else "starting", problem=error.message if has_socket else ""
        )
    deployment = connector.deployment
    assert deployment is not None, "it has answered"
    listed = msgspec.structs.replace(listed, state="running", url=deployment.url, processes=processes)
    has_links = any(process.region for process in processes)
    if not deployment.spans_hosts and not (has_links and deployment.url):
        return listed
    if not deployment.url:
        problem = "no frontend runs here: workers of other hosts are seen where one does"
        return msgspec.structs.replace(listed, problem=problem)
    server = FrontendAddress(
        deployment.url,
        certificate=Path(record.certificate) if record is not None and record.certificate else None,
    )
    try:
        workers: list[dict[str, Any]] = msgspec.json.decode(ask(server, "/admin/workers"))["workers"]
    except (PenstockError, msgspec.DecodeError, KeyError) as error:
        what = "workers of other hosts are" if deployment.spans_hosts else "the way to other regions is"
        return msgspec.structs.replace(listed, problem=f"{what} not known: {error}")
    remote = _elsewhere(workers, processes) if deployment.spans_hosts else ()
    return msgspec.structs.replace(listed, remote=remote, links=_links(workers))


def _elsewhere(
    workers: Sequence[dict[str, Any]], processes: Sequence[ProcessView]
) -> tuple[RemoteWorkerView, ...]:
    """Give the workers of other hosts."""
    here = {(process.name, process.pid) for process in processes}
    return tuple(
        RemoteWorkerView(
            name=worker["name"],
            role=worker["role"],
            condition=worker["condition"],
            host=worker["host"],
            address=worker["address"],
        )
        for worker in workers
        if (worker["name"].partition("@")[0], worker["pid"]) not in here
    )


def _links(workers: Sequence[dict[str, Any]]) -> tuple[LinkView, ...]:
    """Give the links with their last reports."""
    found = ((worker, (worker.get("load") or {}).get("link")) for worker in workers)
    return tuple(
        LinkView(
            region=link["region"],
            condition=worker["condition"],
            round_trip_s=link["round_trip_s"],
            frontends=link["frontends"],
            healthy=link["healthy"],
        )
        for worker, link in found
        if link is not None
    )


def table(listed: Sequence[DeploymentView]) -> Iterator[str]:
    """Format a line for each deployment, and below it one for each of its processes."""
    for each in listed:
        parts = [
            each.url or each.follows or "no frontend here" if each.state == "running" else "",
            each.graph,
        ]
        if each.pid is not None:
            parts.insert(0, f"pid {each.pid}")
        if each.state == "killed":
            left = f"has left process groups ({each.left}); " if each.left else ""
            parts = [f"{left}penstock down removes {each.directory}"]
        names = [*(process.name for process in each.processes), *(worker.name for worker in each.remote)]
        width = max([_NAME_WIDTH, *map(len, names)])
        yield _row(each.name, each.state, age(each.age_s) if each.pid is not None else "", parts)
        templates = {process.template for process in each.processes if process.template}
        links = {link.region: link for link in each.links}
        for process in each.processes:
            shows_template = len(templates) > len(_roles(each))
            link = links.get(process.region)
            yield f"  {_process(process, link, shows_template=shows_template, width=width)}"
        for worker in each.remote:
            yield "  " + _row(
                worker.name,
                worker.condition,
                worker.role,
                [f"host {worker.host}", worker.address],
                width=width,
            )
        if each.problem:
            yield f"  ({each.problem})"


def _roles(each: DeploymentView) -> set[str]:
    return {process.role for process in each.processes if process.role is not None}


def _process(process: ProcessView, link: LinkView | None, *, shows_template: bool, width: int) -> str:
    """Format a process: a link with its report, a worker with its template where its role has several, as during `penstock apply`."""
    details = [f"GPU {device}" for device in process.devices]
    if shows_template and process.template:
        details.append(f"settings {process.template[:_KEY_SHOWN]}")
    if process.core is not None:
        details.append(f"core {process.core}")
    if link is not None and link.round_trip_s:
        details.append(f"{link.round_trip_s * 1e3:.1f} ms away")
        details.append(f"{link.healthy} of {link.frontends} frontends")
    pid = "" if process.pid is None else f"pid {process.pid}"
    return _row(
        process.name,
        process.state,
        process.role or ("link" if process.region else "frontend"),
        [pid, age(process.age_s), process.phase, ", ".join(details)],
        width=width,
    )


def _row(name: str, state: str, third: str, parts: Sequence[str], *, width: int = _NAME_WIDTH) -> str:
    return f"{name:<{width}} {state:<9} {third:<10}  {'  '.join(filter(None, parts))}".rstrip()


def _write(lines: Sequence[str] | Iterator[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
