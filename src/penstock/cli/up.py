"""`penstock up`."""

import argparse
from pathlib import Path
from typing import Any

from penstock.cli.arguments.flags import add_log_level, add_set


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "up",
        help="run a graph on this host, or its part of one that spans hosts",
        description="Run a deployment graph on this host, in the foreground. Hosts with one registry are one deployment:"
        " each runs the roles that --run names.",
        epilog="All hosts need one secret: runtime.secret_file, or PENSTOCK_SECRET.",
    )
    parser.add_argument("file", metavar="FILE", help="YAML, or Python that sets `graph`")
    parser.add_argument(
        "--join",
        metavar="ADDRESS",
        help="the runtime.hub of another host, as tcp://10.0.0.1:7400; with etcd all hosts have the same graph instead",
    )
    parser.add_argument(
        "--leader",
        metavar="ADDRESS",
        help="of a worker over several nodes: where its first node listens for the others, as tcp://10.0.0.1:7405",
    )
    parser.add_argument(
        "--node-rank",
        metavar="N",
        type=int,
        default=0,
        help="this host's number among the nodes of the worker of --run; 0 leads (default), others have to reach --leader",
    )
    parser.add_argument(
        "--run",
        dest="part",
        metavar="ROLES",
        help="what of the graph runs here, as frontend,decode=2 (default: all)",
    )
    add_set(parser, "set a field, as for serve")
    add_log_level(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.core import log  # noqa: PLC0415
    from penstock.core.native import warn_if_disabled  # noqa: PLC0415
    from penstock.deploy.commands.follow import follow  # noqa: PLC0415
    from penstock.deploy.commands.serve import serve  # noqa: PLC0415
    from penstock.deploy.control.record import Origin  # noqa: PLC0415
    from penstock.deploy.supervisor.local_part import LocalPart  # noqa: PLC0415
    from penstock.graph import Overrides, load  # noqa: PLC0415

    overrides = Overrides(options.set)
    if options.join is not None:
        overrides.assign("runtime.join", options.join, flag="--join")
        overrides.assign("runtime.hub", None, flag="--join")  # the graph's is of the other host
    if options.leader is not None:
        overrides.assign("runtime.leader", options.leader, flag="--leader")
    graph = load(options.file, overrides)
    part = LocalPart() if options.part is None else LocalPart.parse(options.part, graph.roles.present())
    log.configure(options.log_level, process="supervisor")
    warn_if_disabled()
    origin = Origin(
        file=str(Path(options.file).resolve()),
        directory=str(Path.cwd()),
        overrides=overrides.assigned(),
        part=options.part,
    )
    if options.node_rank:
        follow(graph, part, options.node_rank, origin=origin, log_level=options.log_level)
        return 0
    serve(graph, part=part, origin=origin, log_level=options.log_level, first_chat=False)
    return 0
