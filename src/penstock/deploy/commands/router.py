"""`penstock router`: the standalone router in the foreground, until Ctrl-C or SIGTERM."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pydantic
import uvloop
from prometheus_client import CollectorRegistry

from penstock.core.config import wrong
from penstock.core.net.address import Address
from penstock.deploy.commands.serve import say
from penstock.deploy.processes.location import location_here
from penstock.deploy.processes.watched_servers import WatchedServers
from penstock.engine.openai.config import ServerConfig
from penstock.engine.paged.model.checkpoint import Checkpoint
from penstock.frontend.http.routing_http import RoutingHttpConfig, RoutingServer
from penstock.frontend.limits.access import Access, load_api_keys
from penstock.router.service.routing_service import RoutingService


class RouterCommandConfig(RoutingHttpConfig):
    """Settings of `penstock router`."""

    model: str | None = pydantic.Field(default=None, min_length=1)
    """Model of the running servers: a directory or a hub name, of which only the small files are downloaded. Gateways ask for it by the hub name, or the directory's last part."""
    servers: ServerConfig | None = None
    """Running servers, as the `args` of engine `openai`; None: only those that the gateway puts."""

    @pydantic.model_validator(mode="after")
    def _check_servers(self) -> Self:
        if (self.servers is None) != (self.model is None):
            raise wrong("MODEL and --url need each other: the servers' model, and where they answer")
        if self.servers is not None and (self.servers.kv_events or self.servers.kv_events_replay):
            raise wrong("servers.kv_events: the router alone guesses what servers have cached; leave it out")
        return self


def run_router(config: RouterCommandConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the address cannot be listened on, or the model of the running servers cannot be read.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))


async def _serve(config: RouterCommandConfig) -> None:
    requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, requested.set)
    registry = CollectorRegistry()
    router = config.service.router
    router = router.model_copy(update={"location": location_here(router.location)})
    service_config = config.service.model_copy(update={"router": router})
    async with (
        RoutingService(rng=random.Random(), config=service_config, registry=registry) as service,
        _watching(service, config),
    ):
        api_keys = load_api_keys(config.api_key_file)
        server = RoutingServer(service, config, registry, Access(api_keys=api_keys))
        host, port = await server.start()
        if not api_keys and not Address(host=host).is_local:
            say(
                "router",
                "warning",
                f"{host} port {port} answers whoever reaches it: no API key is set; give --api-key-file or PENSTOCK_API_KEY",
            )
        try:
            say(
                "router",
                "ready",
                f"http://{host}:{port}  policy {config.service.router.policy}  Ctrl-C stops",
            )
            await requested.wait()
        finally:
            await server.close()
    say("router", "stopped")


@asynccontextmanager
async def _watching(service: RoutingService, config: RouterCommandConfig) -> AsyncIterator[None]:
    """Watch the running servers, if there are any."""
    if config.servers is None or config.model is None:
        yield
        return
    model, model_dir = await asyncio.to_thread(_find_model, config.model)
    servers = WatchedServers(
        service,
        config.servers,
        model=model,
        model_dir=model_dir,
        say=say,
    )
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(servers.run(), name="servers")
        try:
            yield
        finally:
            watching.cancel()


def _find_model(model: str) -> tuple[str, Path]:
    """Give a model's name for gateways and its directory; a hub name is downloaded, without weights.

    Raises:
        ConfigError: it does not exist.
    """
    directory = Checkpoint.open(model, weights=False).path
    return directory.resolve().name if Path(model).expanduser().is_dir() else model, directory
