"""`penstock serve`: a deployment in the foreground, until Ctrl-C or SIGTERM."""

import asyncio
import signal
from pathlib import Path

import uvloop

from penstock.core import log
from penstock.deploy.card import served_name
from penstock.deploy.commands.to_try import ToTry
from penstock.deploy.control.record import Origin
from penstock.deploy.supervisor.local import LocalDeployment
from penstock.deploy.supervisor.local_part import LocalPart
from penstock.graph import Graph

_SUPERVISOR = "supervisor"


def serve(
    graph: Graph, *, log_level: str, first_chat: bool, origin: Origin, part: LocalPart | None = None
) -> None:
    """Run a deployment, or this host's part of it, until a signal; a second signal cancels requests in flight.

    Raises:
        ConfigError: the graph cannot run on this machine.
        PenstockError: the deployment failed for good.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(graph, log_level=log_level, first_chat=first_chat, origin=origin, part=part))


async def _serve(
    graph: Graph, *, log_level: str, first_chat: bool, origin: Origin, part: LocalPart | None
) -> None:
    def say(name: str, state: str, detail: str = "") -> None:
        deployment.output.print(state_line(name, state, detail))

    deployment = LocalDeployment(graph, log_level=log_level, say=say, part=part, origin=origin)
    log.configure(log_level, process=_SUPERVISOR, stream=deployment.output.tee(_SUPERVISOR))
    stopping = _Stopping(deployment)
    try:
        async with deployment:
            stopping.is_started = True
            workers = [member.ready.is_set() for member in deployment.pool.members]
            share = "" if all(workers) else f"  {sum(workers)} of {len(workers)} workers"
            say(
                "penstock",
                "ready",
                f"{deployment.url or 'no frontend here'}  model {served_name(graph)}{share}  Ctrl-C stops",
            )
            if deployment.url:
                to_try = _to_try(deployment)
                say("penstock", "try", to_try.commands())
                if first_chat:
                    await _chat_until(stopping.requested, deployment, to_try)
                else:
                    say("penstock", "try", to_try.curl())
            await stopping.requested.wait()
            say("penstock", "stopping", "finishes requests in flight; Ctrl-C again ends them at once")
    except asyncio.CancelledError:
        if not stopping.requested.is_set():
            raise
    say("penstock", "stopped")


def _to_try(deployment: LocalDeployment) -> ToTry:
    frontend = deployment.graph.frontend
    return ToTry(
        url=deployment.url,
        model=served_name(deployment.graph),
        asks_key=deployment.asks_for_keys,
        has_key=deployment.asks_for_keys and deployment.api_key is not None,
        certificate=None if frontend.tls is None else Path(frontend.tls.certificate).resolve(),
        has_page=frontend.page.enabled,
    )


async def _chat_until(requested: asyncio.Event, deployment: LocalDeployment, to_try: ToTry) -> None:
    """Send the first chat, where a key and trust in the certificate are not asked for; a signal cancels it."""
    has_no_key = to_try.asks_key and not to_try.has_key  # the file has hashes only
    if not has_no_key and to_try.certificate is None:
        from penstock.deploy.commands.first_chat import chat_once  # noqa: PLC0415 - imports an HTTP client

        chat = chat_once(to_try.url, to_try.model, deployment.api_key, write=deployment.output.print)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(chat), group.create_task(requested.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
    if not requested.is_set():
        deployment.output.print(f"{to_try.more()}\n")


class _Stopping:
    """Handles SIGINT, SIGTERM and SIGHUP: during the start gives up, later drains, the second time ends at once."""

    def __init__(self, deployment: LocalDeployment) -> None:
        self.requested = asyncio.Event()
        self.is_started = False
        self._deployment = deployment
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.requested.is_set():
            self._deployment.kill()
        self.requested.set()
        if not self.is_started and self._task is not None:
            self._task.cancel()


def state_line(name: str, state: str, detail: str = "") -> str:
    """Give the line that tells one change of state."""
    return f"{name:<11} {state:<9} {detail}".rstrip() + "\n"
