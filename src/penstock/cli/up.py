"""`penstock up`."""

import argparse
import asyncio
import signal
from pathlib import Path

import uvloop

from penstock.cli.parser import Parser, add_log_level, add_set
from penstock.cli.serve import serve, state_line
from penstock.core import log
from penstock.core.native import warn_if_disabled
from penstock.core.types.instances import Role
from penstock.deploy.control.hosted import DeploymentOrigin
from penstock.deploy.supervisor.follower_host import FollowerHost
from penstock.deploy.supervisor.local_part import LocalPart, followed_role
from penstock.graph import Graph, Overrides, load


def add_up(parser: Parser) -> None:
    """Add the arguments of `penstock up`."""
    parser.description = (
        "Run a deployment graph on this host, in the foreground. Hosts with one registry are one deployment:"
        " each runs the roles that --run names."
    )
    parser.epilog = "All hosts need one secret: runtime.secret_file, or PENSTOCK_SECRET."
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
    origin = DeploymentOrigin(
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


_SUPERVISOR = "supervisor"


def follow(graph: Graph, part: LocalPart, rank: int, *, origin: DeploymentOrigin, log_level: str) -> None:
    """Run a follower until a signal; a second signal does not wait until the leader has drained.

    Raises:
        ConfigError: `part` names no worker over several nodes, or this node cannot run its processes.
    """
    role = followed_role(graph, part, rank)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_follow(graph, role, rank, origin, log_level))


async def _follow(graph: Graph, role: Role, rank: int, origin: DeploymentOrigin, log_level: str) -> None:
    def say(name: str, state: str, detail: str = "") -> None:
        host.output.print(state_line(name, state, detail))

    host = FollowerHost(graph, role, rank, origin=origin, log_level=log_level, say=say)
    log.configure(log_level, process=_SUPERVISOR, stream=host.output.tee(_SUPERVISOR))
    requested, task = asyncio.Event(), asyncio.current_task()
    has_started = False

    def on_signal() -> None:
        if requested.is_set():
            host.kill()
        requested.set()
        if not has_started and task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        async with host.running():
            has_started = True
            await requested.wait()
            say("penstock", "stopping", "the leader finishes its requests first; Ctrl-C again ends at once")
    except asyncio.CancelledError:
        if not requested.is_set():
            raise
    say("penstock", "stopped")
