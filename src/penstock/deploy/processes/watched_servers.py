"""Running servers as workers of the router alone: health checks, a circuit breaker, and their own word of their load."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.health.watch import HealthWatch
from penstock.engine.openai.metrics import ServerLoad
from penstock.engine.openai.server import ServedModel, Server
from penstock.engine.openai.text import TextCodec
from penstock.router.service import gateway
from penstock.router.service.routing_service import RoutingService

Say = Callable[..., None]


class WatchedServers:
    """Registers each server once it serves the model, and lets it get no requests while it fails. One task runs it."""

    def __init__(
        self, service: RoutingService, config: ServerConfig, *, model: str, model_dir: Path, say: Say
    ) -> None:
        """Ask nothing yet.

        Args:
            service: the router.
            config: where the servers are, and how to watch them.
            model: the model's name, for gateways.
            model_dir: the model's directory, with its tokenizer.
            say: tells (name, state, why) to whoever started the router.

        Raises:
            ConfigError: there is no tokenizer, or the servers' key cannot be read.
        """
        self._service = service
        self._config = config
        self._model = model
        self._say = say
        codec = TextCodec.open(str(model_dir))
        self._servers = {
            f"server-{number}": Server(url, config, (model, str(model_dir)), codec)
            for number, url in enumerate(config.url, start=1)
        }
        self._watches: dict[str, HealthWatch] = {}
        service.on_end = self._request_ended

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for name, server in self._servers.items():
                    group.create_task(self._watch(name, server), name=name)
        finally:
            for server in self._servers.values():
                await server.close()

    async def _watch(self, name: str, server: Server) -> None:
        described = await self._start(name, server)
        try:
            load = await server.load()
        except PenstockError:
            load = None  # the health check will tell
        size = self._service.config.block_size
        await self._service.put(
            name,
            gateway.Server(
                url=server.url,
                model=self._model,
                total_blocks=((load and load.kv_tokens) or 0) // size,
            ),
        )
        self._say(name, "ready", f"{server.url}  {described.name}")
        problems: asyncio.Queue[str | None] = asyncio.Queue(maxsize=1)
        self._watches[name] = HealthWatch(
            server,
            self._config,
            on_change=lambda problem, _is_silent: _replace(problems, problem),
            on_load=partial(self._note_load, name),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watches[name].run())
            while True:
                problem = await problems.get()
                await self._service.note_problem(name, problem)
                self._say(name, "unhealthy" if problem else "ready", problem or "serves again")

    async def _start(self, name: str, server: Server) -> ServedModel:
        """Try a server until it serves the model, with back-off; say once why it does not."""
        told, delay_s = None, self._config.health.interval_s
        while True:
            try:
                described = await server.check()
                await server.try_out(described)
            except PenstockError as error:
                if error.message != told:
                    told = error.message
                    self._say(name, "failed", told)
            else:
                return described
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, max(self._config.health.retry_s_max, self._config.health.interval_s))

    def _note_load(self, name: str, load: ServerLoad) -> None:
        self._service.note_load(name, load.running or 0, load.waiting or 0, load.kv_usage)

    def _request_ended(self, name: str, failed: bool) -> None:  # noqa: FBT001
        watch = self._watches.get(name)
        if watch is None:
            return
        if failed:
            watch.request_failed("the gateway's feedback says failed")
        else:
            watch.request_succeeded()


def _replace(problems: "asyncio.Queue[str | None]", problem: str | None) -> None:
    """Put the latest word; an older one that nobody has read counts no more."""
    if problems.full():
        problems.get_nowait()
    problems.put_nowait(problem)
