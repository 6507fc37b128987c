"""`penstock up --node-rank`: a follower, in the foreground, until Ctrl-C or SIGTERM."""

import asyncio
import signal

import uvloop

from penstock.core import log
from penstock.core.types.instances import Role
from penstock.deploy.commands.serve import state_line
from penstock.deploy.control.record import Origin
from penstock.deploy.supervisor.local_part import LocalPart, followed_role
from penstock.deploy.supervisor.nodes.follower_host import FollowerHost
from penstock.graph import Graph

_SUPERVISOR = "supervisor"


def follow(graph: Graph, part: LocalPart, rank: int, *, origin: Origin, log_level: str) -> None:
    """Run a follower until a signal; a second signal does not wait until the leader has drained.

    Raises:
        ConfigError: `part` names no worker over several nodes, or this node cannot run its processes.
    """
    role = followed_role(graph, part, rank)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_follow(graph, role, rank, origin, log_level))


async def _follow(graph: Graph, role: Role, rank: int, origin: Origin, log_level: str) -> None:
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
